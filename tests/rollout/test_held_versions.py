"""A replica with several open ids: what is admitted, and which adapters may go."""

import random

import pytest

from laminar_hpc.rollout.state import ReplicaPhase, WrongState
from laminar_hpc.rollout.versions import HeldVersions


def load(state: HeldVersions, weight_id: int, back: bool = False) -> None:
    state.begin_pull(weight_id, back=back)
    state.verified(weight_id)
    state.open(weight_id)


@pytest.mark.parametrize("seed", range(20))
def test_an_id_stays_while_a_trajectory_needs_it(seed):
    """Whatever is granted, moved, loaded and unloaded in whatever order: requests are on open ids alone, no
    more than held_max + 1 adapters are open, the newest stays, the count is that of a plain list, and what is
    refused changes nothing."""
    draw, state, running = random.Random(seed), HeldVersions(held_max=2), list[int]()
    newest = -1
    for _ in range(400):
        weight_id = draw.randint(0, newest + 2)
        action = draw.choice(("load", "back", "grant", "reserve", "finish", "close"))
        before = (state.held, state.in_flight, state.phase, state.weight_id)
        try:
            if action in ("load", "back"):
                load(state, weight_id, back=action == "back")
                newest = max(newest, weight_id)
            elif action == "grant":
                state.grant(weight_id, 2)
                running += [weight_id] * 2
            elif action == "reserve":
                state.reserve(weight_id)
                running.append(weight_id)
            elif action == "finish":
                state.finished(weight_id)
                running.remove(weight_id)
            else:
                state.close(weight_id)
        except WrongState:
            assert (state.held, state.in_flight, state.phase, state.weight_id) == before
        assert set(running) <= set(state.held) and len(state.held) <= 3
        assert state.in_flight == len(running)
        assert state.weight_id == (newest if newest >= 0 else None)
        assert (state.phase is ReplicaPhase.DRAINING) == bool(running)
        for unneeded in state.unneeded():
            assert unneeded not in running and unneeded < sorted(state.held)[-2]


def test_an_adapter_is_loaded_beside_what_runs():
    """No drain: work goes on over the load, is admitted meanwhile on what is open, and not before its
    verification on what is loaded."""
    state = HeldVersions(held_max=2)
    assert state.phase is ReplicaPhase.UNVERIFIED
    state.begin_pull(3)
    assert state.phase is ReplicaPhase.PULLING
    state.verified(3)
    state.open(2)
    state.grant(3, 1)
    state.begin_pull(4)
    state.grant(3, 1)
    state.finished(3)
    assert state.phase is ReplicaPhase.DRAINING
    with pytest.raises(WrongState, match="work on weight id 4"):
        state.grant(4, 1)
    with pytest.raises(WrongState, match="loading weight id 5"):
        state.begin_pull(5)
    state.verified(4)
    state.open(3)
    assert (state.held, state.weight_id, state.weight_step) == ([3, 4], 4, 3)


def test_older_weights_come_beside_the_newest():
    """For trajectories of a dead replica; new work stays on the newest. A slot that is gone changes nothing;
    an engine that is gone takes all."""
    state = HeldVersions(held_max=2)
    load(state, 5)
    with pytest.raises(WrongState, match="going back to weight id 4"):
        state.begin_pull(4)
    load(state, 4, back=True)
    assert (state.held, state.weight_id, state.weight_step) == ([4, 5], 5, 5)
    state.begin_pull(3, back=True)
    state.failed()
    assert (state.held, state.phase) == ([4, 5], ReplicaPhase.OPEN)
    state.grant(4, 2)
    state.abandoned()
    assert (state.held, state.in_flight, state.weight_id) == ([], 0, None)
    assert state.phase is ReplicaPhase.UNVERIFIED
