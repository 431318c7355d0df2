"""The layout of a response: what goes in comes out, without a copy, and nothing that is damaged does."""

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.made import runs
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.store.payload.layout import (
    DamagedResponse,
    Response,
    drawn,
    logprobs_array,
    pack,
    packed_digest,
    tokens_array,
    unpack,
)

T = TypeVar("T")


def columns(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    return tokens_array(np.arange(tokens) * 7), logprobs_array(-np.arange(tokens) / 256)


def response(tokens: int, mask: list[int] | None = None) -> Response:
    mask_runs = drawn(tokens, [VersionSpan(5, 0, tokens)]) if mask is None else runs(mask)
    return Response(2**40, 3, *columns(tokens), [VersionSpan(5, 0, tokens)], mask_runs)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 4))
def test_what_goes_in_comes_out(mask, spans):
    """Any loss mask, any number of spans; tokens and log-probs bit for bit."""
    made = response(len(mask), mask)
    made = Response(
        *(made.trajectory_id, made.attempt, made.tokens, made.logprobs),
        [VersionSpan(-1 + i, i, i + 1) for i in range(spans)],
        made.mask_runs,
    )
    packed = pack(made)
    found = unpack(packed)
    assert (found.trajectory_id, found.attempt, found.spans) == (2**40, 3, made.spans)
    assert found.tokens.tolist() == made.tokens.tolist() and found.digest == packed_digest(packed)
    assert found.logprobs.tobytes() == made.logprobs.tobytes()
    assert found.loss_mask.tolist() == mask and found.trained == sum(mask)
    assert len(packed) % 4 == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=9), st.integers(0, 3))
def test_what_no_span_covers_is_not_trained(parts, rest):
    """Spans of drawn tokens, each behind some that the environment gave; also where one ends and the next
    begins at once."""
    spans, mask = [], []
    for given_tokens, drawn_tokens in parts:
        begin = len(mask) + given_tokens
        spans.append(VersionSpan(len(spans), begin, begin + drawn_tokens))
        mask += [0] * given_tokens + [1] * drawn_tokens
    mask += [0] * rest
    found = Response(1, 0, *columns(len(mask)), spans, drawn(len(mask), spans))
    assert found.loss_mask.tolist() == mask and found.mask_runs.tolist()[1:] == runs(mask).tolist()[1:]
    assert unpack(pack(found)).trained == sum(mask)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=9))
def test_branches_begin_where_they_were_begun(parts):
    """docs/promises.md#branches: before any turn but the first, with what is given; behind drawn tokens,
    or behind others that were given: which tokens are trained stays the same."""
    spans, starts, at = [], [], 0
    for begins, given_tokens, drawn_tokens in parts:
        if begins and at:
            at += given_tokens
            starts.append(at)
            given_tokens = 1 + drawn_tokens
        at += given_tokens + drawn_tokens
        spans.append(VersionSpan(5, at - drawn_tokens, at))
    found = unpack(pack(Response(1, 0, *columns(at + 2), spans, drawn(at + 2, spans, starts))))
    plain = Response(1, 0, *columns(at + 2), spans, drawn(at + 2, spans))
    assert found.starts == starts and plain.starts == []
    assert found.loss_mask.tolist() == plain.loss_mask.tolist() and found.trained == plain.trained


def peak(work: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and the bytes that it has at most: the least of three times, as other threads of these
    tests may take some too."""
    found = []
    for _ in range(3):
        tracemalloc.start()
        made = work()
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return made, min(found)


def test_eight_bytes_per_token_and_no_object_for_any():
    """Packing takes two copies of the columns, unpacking none; neither makes an object per token."""
    made = response(1 << 20)
    packed, packing = peak(lambda: pack(made))
    found, unpacking = peak(lambda: unpack(packed))
    assert len(packed) < 8 * (1 << 20) + 100 and packing < 17 << 20 and unpacking < 10_000
    assert np.shares_memory(found.tokens, np.frombuffer(packed, np.uint8)) and len(found.tokens) == 1 << 20


@given(st.data())
def test_any_changed_byte_is_found(data):
    """Also in the header, the spans, the mask; and any part that is cut off."""
    packed = pack(response(9, [1, 0, 0, 1, 1, 1, 1, 0, 1]))
    place, bit = data.draw(st.integers(0, len(packed) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(packed)
    changed[place] ^= 1 << bit
    for damaged in (bytes(changed), packed[:place], packed + b"\0"):
        with pytest.raises(DamagedResponse):
            unpack(damaged)


def test_columns_that_do_not_belong_together_are_refused():
    """Neither lengths that differ nor token ids beyond 32 bits are written."""
    made = response(4)
    with pytest.raises(DamagedResponse, match="4 tokens, 3 log-probs"):
        pack(Response(0, 0, made.tokens, made.logprobs[:3], made.spans, made.mask_runs))
    for wrong in ([2**31], [0.5], [-(2**31) - 1]):
        with pytest.raises(DamagedResponse, match="32-bit"):
            tokens_array(wrong)
