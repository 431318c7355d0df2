"""The replica's state machine: weights change only when nothing is in flight, and work is admitted only for
the open id."""

import itertools

import pytest

from laminar_hpc.rollout.state import ReplicaPhase, ReplicaState, WrongState


def opened(weight_id: int = 3) -> ReplicaState:
    state = ReplicaState()
    state.begin_pull(weight_id)
    state.verified(weight_id)
    state.open(weight_step=weight_id - 1)
    return state


def test_life_of_a_replica():
    """The order of docs/staleness.md: open(id) -> draining -> open(id) -> pulling ->
    verified -> open(new id)."""
    state = opened(3)
    seen = [state.phase]
    state.grant(3, requests=2)
    seen.append(state.phase)
    state.finished()
    state.finished()
    seen.append(state.phase)
    state.begin_pull(5)
    seen.append(state.phase)
    state.verified(5)
    seen.append(state.phase)
    state.open(weight_step=4)
    assert seen == [
        ReplicaPhase.OPEN,
        ReplicaPhase.DRAINING,
        ReplicaPhase.OPEN,
        ReplicaPhase.PULLING,
        ReplicaPhase.VERIFIED,
    ]
    assert (state.phase, state.weight_id, state.weight_step) == (ReplicaPhase.OPEN, 5, 4)


def test_work_on_another_id_is_refused_and_changes_nothing():
    """Every request names the id it expects and is refused otherwise."""
    state = opened(3)
    for wrong in (2, 4, -1):
        with pytest.raises(WrongState, match=f"work on weight id {wrong}"):
            state.grant(wrong, requests=1)
    assert (state.phase, state.in_flight) == (ReplicaPhase.OPEN, 0)


def test_nothing_is_added_to_a_batch_and_no_weights_come_into_it():
    """A local batch is a closed set on one id: while it drains there is no second grant and no pull."""
    state = opened(3)
    state.grant(3, requests=1)
    for step in (
        lambda: state.grant(3, 1),
        lambda: state.begin_pull(4),
        lambda: state.open(3),
        lambda: state.verified(4),
    ):
        with pytest.raises(WrongState):
            step()
    state.finished()
    assert state.phase is ReplicaPhase.OPEN


def test_weights_are_open_only_after_their_verification():
    """docs/promises.md#verified-weights: no step leads from unverified or pulled weights to work."""
    state = ReplicaState()
    for step in (lambda: state.open(0), lambda: state.verified(1), lambda: state.grant(-1, 1)):
        with pytest.raises(WrongState):
            step()
    state.begin_pull(1)
    with pytest.raises(WrongState):
        state.open(0)
    state.verified(2)  # a newer slot came while the pull went on
    state.open(weight_step=1)
    assert state.weight_id == 2


def test_an_id_goes_back_only_where_that_is_asked_for():
    """For trajectories that began with it elsewhere, and never under work."""
    state = opened(3)
    for old in (3, 2):
        with pytest.raises(WrongState):
            state.begin_pull(old)
    state.grant(3, requests=1)
    with pytest.raises(WrongState):
        state.begin_pull(2, back=True)
    state.finished()
    state.begin_pull(2, back=True)
    with pytest.raises(WrongState):
        state.verified(1)
    state.verified(2)
    state.open(weight_step=1)
    state.grant(2, requests=1)
    assert (state.weight_id, state.weight_step, state.phase) == (2, 1, ReplicaPhase.DRAINING)


def test_after_a_pull_that_failed_nothing_is_open():
    """docs/promises.md#verified-weights: what is in the engine then is not known; any newer weights are
    due."""
    state = opened(3)
    with pytest.raises(WrongState):
        state.failed()
    state.begin_pull(2, back=True)
    state.failed()
    assert (state.phase, state.weight_id) == (ReplicaPhase.UNVERIFIED, None)
    with pytest.raises(WrongState):
        state.grant(3, requests=1)
    state.begin_pull(3)
    state.verified(3)


def test_invariants_over_all_short_histories():
    """Whatever is called in whatever order: work in flight only while DRAINING, and the id only grows."""
    steps = {
        "pull": lambda s: s.begin_pull(s.next_weight_id),
        "verified": lambda s: s.verified(s.next_weight_id),
        "open": lambda s: s.open(0),
        "grant": lambda s: s.grant(s.weight_id, 2),
        "finished": lambda s: s.finished(),
    }
    for history in itertools.product(steps, repeat=6):
        state = ReplicaState()
        last = 0
        for name in history:
            try:
                steps[name](state)
            except WrongState:
                continue
            assert (state.in_flight > 0) == (state.phase is ReplicaPhase.DRAINING)
            assert state.next_weight_id >= last
            last = state.next_weight_id
