"""Which prompts go out first: each draw once and never far from its place, replicas with equal shares of the
long ones, and expectations within what was seen."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policies.dispatch import DrawOrder, ExpectedLengths, dealt

LENGTHS = st.lists(st.integers(1, 40_000), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(0, 5), LENGTHS), max_size=30), st.integers(0, 9))
def test_an_expected_length_lies_within_what_was_seen(
    groups: list[tuple[int, list[int]]], asked: int
) -> None:
    """That of a known prompt is the mean of its last group; of another one, the mean over the known. Another
    object that was told the same expects the same, so a controller that starts again does."""
    lengths, again = ExpectedLengths(), ExpectedLengths()
    last: dict[int, float] = {}
    for prompt, found in groups:
        lengths.finished(prompt, found)
        again.finished(prompt, found)
        last[prompt] = sum(found) / len(found)
    expected = lengths.expected_length(asked)
    assert lengths.knows(asked) == (asked in last) and again.expected_length(asked) == expected
    if asked in last:
        assert expected == last[asked]
    else:
        mean = sum(last.values()) / max(1, len(last))
        assert abs(expected - mean) <= 1e-6 * (1 + mean)


@given(st.lists(st.floats(0, 1e5), max_size=60), st.integers(1, 9))
def test_local_batches_get_equal_shares(tokens: list[float], batch: int) -> None:
    """Each place once; as many runs as it takes, none longer than a batch, each from the longest to the
    shortest; two runs of as many prompts differ by less than the longest and the shortest prompt do."""
    order = dealt(tokens, batch)
    assert sorted(order) == list(range(len(tokens)))
    runs = -(-len(tokens) // batch)
    short, longer = divmod(len(tokens), runs or 1)
    places, hands = iter(order), list[list[float]]()
    for place in range(runs):
        first_row_is_even = short % 2 == 0
        more = place < longer if first_row_is_even else place >= runs - longer
        hands.append([tokens[i] for i in itertools.islice(places, short + more)])
    assert all(len(hand) <= batch and hand == sorted(hand, reverse=True) for hand in hands)
    spread = max(tokens, default=0.0) - min(tokens, default=0.0)
    for one, other in itertools.combinations(hands, 2):
        if len(one) == len(other):
            assert abs(sum(one) - sum(other)) <= spread * (1 + 1e-9) + 1e-6


@given(
    st.integers(1, 12),
    st.integers(1, 15),
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 11), st.integers(1, 99)),
)
@settings(deadline=None)
def test_no_draw_is_passed_over_for_long(rows: int, block: int, batch: int, known: dict[int, int]) -> None:
    """A draw goes out fewer than `block` places from its own, also while lengths become known; and each
    prompt of a pass once before any goes out again."""
    lengths = ExpectedLengths()
    order = DrawOrder(lengths, lambda draw: draw * 5 % rows if rows % 5 else draw % rows, rows, block)
    out = []
    for place in range(4 * rows):
        draw = order.take(batch)
        assert abs(draw - place) < block
        out.append(draw)
        if draw % rows in known:
            lengths.finished(draw % rows, [known[draw % rows]])
    for number in range(4):
        assert sorted(out[number * rows : (number + 1) * rows]) == list(
            range(number * rows, number * rows + rows)
        )


def test_what_is_not_known_stays_in_its_place() -> None:
    """A first pass goes out as drawn, and so does everything with a block of one."""
    lengths = ExpectedLengths()
    first = DrawOrder(lengths, lambda draw: draw % 6, 6, block=4)
    assert [first.take(2) for _ in range(6)] == list(range(6))
    for prompt in range(6):
        lengths.finished(prompt, [prompt])
    assert [first.take(2) for _ in range(6)] == [9, 6, 8, 7, 11, 10]
    in_order = DrawOrder(lengths, lambda draw: draw % 6, 6, block=1)
    assert [in_order.take(2) for _ in range(12)] == list(range(12))
