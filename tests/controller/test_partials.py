"""The partial-response pool: what it holds is a gapless beginning of one attempt's response."""

from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.line.messages.data import Partial, VersionSpan
from laminar_hpc.line.messages.rollouts import Increment
from laminar_hpc.rollout.partial_response import columns, tokens_of


def increment(attempt: int, start: int, tokens: list[int]) -> Increment:
    spans = [VersionSpan(4, start, start + len(tokens))]
    return Increment(9, attempt, start, *columns(tokens, [-0.5] * len(tokens)), spans, 1.0)


def test_increments_follow_on_each_other():
    """The pool holds a response without gaps and without doubles."""
    pool = PartialResponsePool()
    pool.add(increment(0, 0, [1, 2]))
    pool.add(increment(0, 2, [3]))
    pool.add(increment(0, 5, [9]))  # a gap: one was lost
    held = pool.get(9, 0)
    assert held == Partial(*columns([1, 2, 3], [-0.5] * 3), [VersionSpan(4, 0, 3)], 1.0) and pool.tokens == 3
    assert pool.get(9, 1) is None and pool.drop(9) == 3 and pool.tokens == 0 and len(pool) == 0


def test_given_tokens_stay_between_spans():
    """docs/promises.md#loss-mask: what comes without a span was given by the environment."""
    pool = PartialResponsePool()
    pool.add(increment(0, 0, [1, 2]))
    pool.add(Increment(9, 0, 2, *columns([7, 8], [0.0, 0.0]), [], 1.0))
    pool.add(increment(0, 4, [3]))
    held = pool.get(9, 0)
    assert held is not None and held.spans == [VersionSpan(4, 0, 2), VersionSpan(4, 4, 5)]
    assert (held.count, held.trained, held.weight_ids) == (5, 3, {4})


def test_a_newer_attempt_takes_the_place_of_an_older_one():
    """What an earlier owner sends late is left out."""
    pool = PartialResponsePool()
    pool.add(increment(0, 0, [1, 2]))
    pool.put(9, 1, Partial(*columns([1, 2], [-0.5] * 2), [VersionSpan(4, 0, 2)], 1.0, 1))  # it has moved
    pool.add(increment(0, 2, [3]))  # late, of the source
    pool.add(increment(1, 2, [4]))
    assert pool.get(9, 0) is None
    held = pool.get(9, 1)
    assert (
        held is not None
        and tokens_of(held).tolist() == [1, 2, 4]
        and held.spans == [VersionSpan(4, 0, 3)]
        and held.moves == 1
    )
    pool.add(increment(2, 3, [5]))  # does not begin at the beginning
    assert pool.get(9, 2) is None and pool.get(9, 1) == held
