"""How many replicas a run should have: within its bounds whatever is measured, monotone in what the trainer
takes, and at rest while the rates stay the same or swing."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policies.scaling import PATIENCE_MAX, POOR, Costs, Scaling, ScalingWindow, rates

FREE = Costs(left=1e9, start=0.0, drain=0.0)
positive = st.floats(0.5, 1e6)
shares = st.floats(0.0, 1.0)
spans = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda t: (t[0], t[0] + t[1]))
curves = st.lists(st.floats(1e-4, 1e-1), min_size=1, max_size=5).map(
    lambda steps: [(1 << i, seconds) for i, seconds in enumerate(sorted(steps))]
)


@st.composite
def windows(draw: st.DrawFn) -> ScalingWindow:
    seconds = draw(positive)
    return ScalingWindow(
        steps=5,
        tokens=draw(positive),
        seconds=seconds,
        waited=seconds * draw(shares),
        replicas=draw(st.integers(1, 60)),
        idle=draw(shares),
        requests=draw(st.just(0.0) | st.floats(1.0, 300.0)),
        curve=draw(curves),
        at_once=draw(st.floats(1.0, 256.0)),
        divides=draw(st.booleans()),
    )


def window_of(demand: float, supply: float, replicas: int) -> ScalingWindow:
    """What a run shows whose trainer would take `demand` and whose replicas give `supply` each, in tokens per
    second, if both overlap well."""
    made = min(demand, replicas * supply)
    return ScalingWindow(
        5, made * 10, 10.0, 10 * (1 - made / demand), replicas, 1 - made / (replicas * supply)
    )


@settings(deadline=None)
@given(span=spans, seen=st.lists(windows(), max_size=12))
def test_a_target_is_within_its_bounds(span, seen):
    """Whatever is measured, in whatever order."""
    policy = Scaling(*span)
    for window in seen:
        decision = policy.decide(window, FREE)
        assert decision is None or (span[0] <= decision.target <= span[1])
        assert decision is None or decision.target != window.replicas


@settings(deadline=None)
@given(window=windows())
def test_more_replicas_never_make_less(window):
    """By the prediction, where a decode step takes no less time with more requests."""
    found = rates(window)
    made = [found.throughput(n) for n in range(1, 61)]
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(made))
    assert made[-1] <= found.demand * (1 + 1e-9)


@settings(deadline=None)
@given(
    span=spans,
    start=st.integers(1, 60),
    supply=positive,
    demands=st.tuples(positive, positive).map(sorted),
)
def test_a_faster_trainer_never_gets_fewer(span, start, supply, demands):
    """Replicas, after the decisions that follow from steady rates."""
    few, many = (settled(span, start, demand, supply)[-1] for demand in demands)
    assert few <= many


@settings(deadline=None)
@given(span=spans, start=st.integers(1, 60), demand=positive, supply=positive)
def test_steady_rates_are_followed_by_changes_of_one_direction(span, start, demand, supply):
    """And by none soon: the number comes to rest, where the run makes nearly as much as it can."""
    numbers = settled(span, min(max(start, span[0]), span[1]), demand, supply)
    changes = [after - before for before, after in pairwise(numbers) if after != before]
    assert len({change > 0 for change in changes}) <= 1 and len(changes) <= 6
    made = [min(demand, n * supply) for n in (numbers[-1], span[1])]
    assert made[0] >= POOR * made[1] * 0.9


def settled(span: tuple[int, int], start: int, demand: float, supply: float) -> list[int]:
    """The numbers of replicas over 40 windows."""
    policy, numbers = Scaling(*span), [start]
    for _ in range(40):
        decision = policy.decide(window_of(demand, supply, numbers[-1]), FREE)
        numbers.append(decision.target if decision else numbers[-1])
    return numbers


@settings(deadline=None, max_examples=30)
@given(span=spans, demands=st.lists(st.floats(1.0, 400.0), min_size=300, max_size=300))
def test_rates_that_swing_are_met_by_patience(span, demands):
    """The number turns round no more often than patience allows, however the trainer's rate swings."""
    policy, now = Scaling(*span), span[0]
    for demand in demands:
        decision = policy.decide(window_of(demand, 10.0, now), FREE)
        now = decision.target if decision else now
    assert policy.reversals <= 8 + len(demands) / PATIENCE_MAX


def test_what_does_not_pay_is_left():
    """A start-up that takes longer than what is gained until the end; replicas that are let go at the end."""
    slow, idle = window_of(100.0, 20.0, 2), window_of(100.0, 100.0, 8)
    assert Scaling(1, 8).decide(slow, Costs(left=100.0, start=70.0, drain=5.0)) is None
    decision = Scaling(1, 8).decide(slow, Costs(left=100.0, start=20.0, drain=5.0))
    assert decision is not None and decision.target > 4
    late = Scaling(1, 8)
    assert [late.decide(idle, Costs(left=20.0, start=20.0, drain=5.0)) for _ in range(4)] == [None] * 4


@settings(deadline=None)
@given(window=windows())
def test_the_present_number_makes_at_least_what_was_seen(window):
    """By the prediction, wherever the two overlap at all."""
    found = rates(window)
    assert found.throughput(window.replicas) >= window.throughput * (1 - 1e-6)


def test_what_the_window_saw_stands_above_the_prediction():
    """A trainer that waits 8% for replicas without an idle second makes 92% of its best: nothing is asked
    for, though rates alone, which overlap less well, would have it at 88%."""
    seen = ScalingWindow(steps=5, tokens=13119, seconds=1.0, waited=0.085, replicas=4, idle=0.0)
    assert rates(seen).throughput(4) == 13119
    assert Scaling(2, 6).decide(seen, FREE) is None


def test_one_window_is_too_few_unless_it_is_urgent():
    """A step that waits for one long response, beside others that do not, asks for nothing; what lasts does,
    and a trainer that waits for much of its time at once."""
    fine = ScalingWindow(steps=5, tokens=99, seconds=1.0, waited=0.01, replicas=4, idle=0.0)
    poor, worse = replace(fine, tokens=84, waited=0.16), replace(fine, tokens=60, waited=0.4)
    policy = Scaling(2, 6)
    assert [policy.decide(window, FREE) for window in (poor, fine) * 5] == [None] * 10
    assert policy.decide(poor, FREE) is None
    assert (decision := policy.decide(poor, FREE)) is not None and decision.target == 5
    assert (decision := Scaling(2, 6).decide(worse, FREE)) is not None and decision.target == 6


def test_a_smaller_local_batch_gives_less():
    """A step that takes as long with one request as with eight: more replicas with fewer requests each gain
    nothing, unless each has more requests than it decodes at once."""
    flat = ScalingWindow(5, 1000, 10.0, 5.0, 2, 0.0, requests=8.0, curve=[(1, 0.01), (8, 0.01)], divides=True)
    assert Scaling(1, 8).decide(flat, FREE) is None
    decision = Scaling(1, 8).decide(replace(flat, at_once=1.0), FREE)
    assert decision is not None and decision.gain > 0.5
