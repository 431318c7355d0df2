"""A trajectory in flight is in one state at a time, and refuses what is not possible in it
(rollout/in_flight.py)."""

import doctest

import pytest

from laminar_hpc.line.messages.data import PromptGroup
from laminar_hpc.line.messages.moves import MoveOrder
from laminar_hpc.rollout import in_flight
from laminar_hpc.rollout.in_flight import State, TrajectoryInFlight
from laminar_hpc.rollout.state import WrongState

ORDER = MoveOrder("m", 7, 0, "")


@pytest.fixture
def trajectory() -> TrajectoryInFlight:
    return TrajectoryInFlight(7, 0, PromptGroup(1, [5], "p", {}, []), 0, 0, 1.0, 100)


def test_the_example_holds() -> None:
    assert doctest.testmod(in_flight).failed == 0


def test_what_is_stranded_or_dropped_stays_so(trajectory: TrajectoryInFlight) -> None:
    """Also where it waits and goes on meanwhile; a drop may be said twice, and is the last word."""
    with trajectory.waiting():
        trajectory.strand()
    with trajectory.waiting():
        assert trajectory.state is State.STRANDED
    trajectory.drop()
    trajectory.drop()
    trajectory.strand()
    assert trajectory.state is State.DROPPED and trajectory.stirred.is_set()


def test_impossible_steps_are_refused(trajectory: TrajectoryInFlight) -> None:
    """And change nothing: a second wait, a second end of its batch, a move of what cannot leave."""
    with trajectory.waiting(), pytest.raises(WrongState, match="cannot become waiting: it is waiting"):
        with trajectory.waiting():
            pass
    assert trajectory.state is State.GENERATING
    with pytest.raises(WrongState, match="cannot leave"):  # it has no request
        trajectory.leave(ORDER)
    trajectory.request_id = "r"
    trajectory.leave(ORDER)
    with pytest.raises(WrongState, match="cannot leave"):
        trajectory.leave(ORDER)
    trajectory.stay()
    trajectory.bound = True
    assert not trajectory.may_leave
    trajectory.strand()
    with pytest.raises(WrongState, match="cannot become stranded"):
        trajectory.strand()
