"""The relay chain's arithmetic: the formula's optimum, the order after a death, and who sends again to
whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.policies.chain import (
    CHUNK_MIN,
    best_chunks,
    broadcast_seconds,
    chain_order,
    chunk_bytes,
    missing,
)

SIZE, START, PER_BYTE = 128_000_000, 1e-3, 2e-8  # 400 Mbit/s


@pytest.mark.parametrize("relays", [2, 4, 8, 127])
def test_k_star_is_the_best_number_of_chunks(relays):
    """Laminar, relay tier: T* = (sqrt(M Tb) + sqrt((p - 2) Ts))^2, with p = relays + 1; no other number of
    chunks is better."""
    best = broadcast_seconds(SIZE, relays, best_chunks(SIZE, relays, START, PER_BYTE), START, PER_BYTE)
    assert best == pytest.approx(((SIZE * PER_BYTE) ** 0.5 + ((relays - 1) * START) ** 0.5) ** 2, rel=1e-3)
    assert all(best <= broadcast_seconds(SIZE, relays, k, START, PER_BYTE) * 1.0001 for k in range(1, 2000))


def test_chunks_have_bounds():
    """A chunk has whole pages, at least CHUNK_MIN bytes and at most the given maximum."""
    assert (
        chunk_bytes(SIZE, 1, START, PER_BYTE, 64 << 20) == 64 << 20
    )  # one relay needs no chunks; the buffers have a size
    assert chunk_bytes(1000, 8, START, PER_BYTE, 64 << 20) == CHUNK_MIN
    assert chunk_bytes(SIZE, 8, START, PER_BYTE, 64 << 20) % 4096 == 0


def test_order_after_deaths_and_for_newcomers():
    """Survivors keep their order, newcomers go to the end, newer weights to the front."""
    assert chain_order([], [2, 0, 1], {}) == [0, 1, 2]
    assert chain_order([0, 1, 2], [1, 2], {1: 5, 2: 5}) == [1, 2]  # the master died: the next one is it
    assert chain_order([1, 2], [0, 1, 2], {1: 5, 2: 5}) == [
        1,
        2,
        0,
    ]  # who comes late stands behind those who have weights
    assert chain_order([0, 1, 2], [0, 1, 2], {0: 4, 1: 5, 2: 4}) == [1, 0, 2]


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 3)),
    st.dictionaries(st.integers(0, 9), st.integers(0, 3)),
    st.sets(st.integers(0, 9)),
)
def test_whoever_misses_the_newest_weights_is_served(has, coming, fit):
    """In an order of `chain_order` there is always somebody before them who has them, until they all have
    them or will."""
    order = chain_order([], sorted(fit), has)
    newest = max((has.get(i, -1) for i in order), default=-1)
    coming, rounds = dict(coming), 0
    while (stretch := missing(order, has, coming)) is not None:
        begin, end = stretch
        assert has[order[begin - 1]] == newest and all(
            has.get(i, -1) < newest and coming.get(i, -1) < newest for i in order[begin:end]
        )
        coming.update(dict.fromkeys(order[begin:end], newest))
        rounds += 1
        assert rounds <= 1, "one order serves a whole stretch"
    first = next((place for place, i in enumerate(order) if has.get(i, -1) < newest), None)
    assert first is None or coming.get(order[first], -1) >= newest
