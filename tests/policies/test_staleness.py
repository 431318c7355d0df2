"""The staleness bound that follows who waits: what it may never do, and when it rises, falls and rests."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policies.admission import bound_holds_back, bound_to_spare
from laminar_hpc.policies.live_groups import GroupView, LiveGroups
from laminar_hpc.policies.staleness import (
    PATIENCE,
    AdaptiveBound,
    StepBounds,
    StepWaits,
    WaitWatch,
)

QUIET = StepWaits(seconds=10.0, waited=0.0, held_back=0.0, spare=True)
BUSY = StepWaits(seconds=10.0, waited=0.0, held_back=0.0, spare=False)
HELD = StepWaits(seconds=10.0, waited=2.0, held_back=2.0, spare=False)
STARVED = StepWaits(seconds=10.0, waited=5.0, held_back=0.0, spare=False)


@settings(deadline=None)
@given(
    first=st.integers(0, 6),
    known=st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=4),
    wanted=st.lists(st.integers(0, 9), max_size=30),
    start=st.integers(0, 45),
)
def test_no_promise_changes_and_due_steps_keep_the_order_of_weights(first, known, wanted, start):
    """Whatever is decided, by this controller or earlier ones with other settings: what a step's bound is
    once it is decided it stays, and the due step never falls behind the last decision of earlier ones."""
    earlier = StepBounds(first)
    for step in sorted(known):
        earlier.decide(step, known[step])
    written = {step: earlier.at(step) for step in known}
    bounds = StepBounds(first, written)
    for step, bound in enumerate(wanted, start):
        decided = bounds.decide(step, bound)
        assert (decided is None) == (bool(written) and step <= max(written))
        if decided is not None:
            written[step] = decided
    assert all(bounds.at(step) == bound for step, bound in written.items())
    last = max(written, default=0)
    assert all(bounds.due(step) <= bounds.due(step + 1) for step in range(last + 20))
    assert StepBounds(first, written).due(last + 3) == bounds.due(last + 3), "another controller agrees"


@settings(deadline=None)
@given(
    maximum=st.integers(1, 9),
    waits=st.lists(
        st.tuples(st.floats(0.1, 100), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=200
    ),
)
def test_never_above_the_maximum_and_never_two_down(maximum, waits):
    """For any waits the bound is from 1 to the maximum, and falls by one at most."""
    policy = AdaptiveBound(2, maximum)
    before = policy.bound
    for seconds, waited, held, spare in waits:
        now = policy.after(StepWaits(seconds, waited * seconds, waited * held * seconds, spare))
        assert 1 <= now <= maximum and now >= before - 1
        before = now


def test_it_rises_where_the_bound_is_in_the_way_only():
    """A trainer that waits for slow rollouts gets no staler data; one that the bound holds back does, by as
    many steps as it could have trained meanwhile."""
    policy = AdaptiveBound(2, 8)
    assert [policy.after(STARVED) for _ in range(50)] == [2] * 50
    assert policy.after(HELD) == 3
    assert AdaptiveBound(2, 8).after(StepWaits(40.0, 30.0, 30.0, False)) == 5
    assert AdaptiveBound(2, 4).after(StepWaits(40.0, 30.0, 30.0, False)) == 4


def test_it_falls_when_a_batch_only_ages_and_comes_to_rest():
    """Where 3 is enough and 2 is not, the bound comes down from 6 and then tries 2 ever more rarely; where
    a smaller one would not have done it does not fall."""
    policy, tried = AdaptiveBound(6, 8), list[int]()
    assert [policy.after(BUSY) for _ in range(50)] == [6] * 50
    for step in range(400):
        before = policy.bound
        policy.after(HELD if policy.bound < 3 else QUIET)
        if policy.bound < 3 <= before:
            tried.append(step)
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert tried[0] <= 5 * PATIENCE
    assert gaps == sorted(gaps) and gaps[0] > PATIENCE and gaps[-1] >= 8 * PATIENCE


def test_a_wait_counts_as_it_was_seen():
    """Seconds from look to look count by what the earlier one saw; the first step has no beginning."""
    watch = WaitWatch()
    watch.look(0.0, waits=True, held=True)
    assert watch.step_done(5.0) is None
    watch.look(6.0, waits=True)
    watch.look(7.0, waits=True, held=True)
    watch.taken(9.0, spare=True)
    assert watch.step_done(15.0) == StepWaits(seconds=10.0, waited=3.0, held_back=2.0, spare=True)
    watch.taken(15.0, spare=False)
    watch.taken(16.0, spare=True)
    assert watch.step_done(18.0) == StepWaits(seconds=3.0, waited=0.0, held_back=0.0, spare=False)


def test_when_a_smaller_bound_would_have_done():
    """Two groups a step, bound 2, after the batch of step 3: not while one of step 1 is unfinished, which
    would be late; not without a batch that is finished."""
    bounds = StepBounds(2)

    def rest(*finished: bool) -> LiveGroups:
        live = LiveGroups()
        for number, (step, done) in enumerate(zip((2, 2, 3, 3), finished, strict=True)):
            live.put(GroupView(number, number, step, finished=done, finish_order=number))
        return live

    assert bound_to_spare(3, rest(True, True, False, False), 2, bounds, 0)
    assert not bound_to_spare(3, rest(True, False, True, False), 2, bounds, 0)
    assert not bound_to_spare(3, rest(True, False, False, False), 2, bounds, 0)
    assert bound_to_spare(3, rest(True, False, True, False), 2, StepBounds(3), 0)


def test_when_the_bound_is_in_the_way():
    """Two groups a step, bound 1: it is where nothing more is granted on the newest weights, or where enough
    has finished; not while replicas could have more."""
    live, bounds = LiveGroups(), StepBounds(1)
    for number in range(1, 4):
        live.put(GroupView(number, number, 0, finished=number == 1, finish_order=number))
    assert not bound_holds_back(0, live, 2, 3, 2, bounds)
    assert bound_holds_back(0, live, 2, 4, 2, bounds)
    live.put(GroupView(2, 2, 0, finished=True, finish_order=2))
    assert bound_holds_back(0, live, 2, 3, 2, bounds)
