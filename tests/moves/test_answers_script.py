"""docs/promises.md#one-call at the controller, message by message: an Answer goes to whoever has the
trajectory by now, and when none will come its owner is told."""

import time
from pathlib import Path

import numpy as np
import pytest

from helpers.control.script import samples_of
from helpers.control.three import Three
from laminar_hpc.line.messages.data import Partial, ReplicaLoad, VersionSpan
from laminar_hpc.line.messages.membership import Ping
from laminar_hpc.line.messages.moves import Answer, Imported, Reserve
from laminar_hpc.rollout.answers import name_of
from laminar_hpc.rollout.partial_response import columns

GIVEN = np.array([5, 6, 7], "<i4").tobytes()


class Moving(Three):
    """`goes` takes a trajectory that waits for its tool from one to another."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.trajectory_id = min(samples_of(self.grant))
        self.name = name_of(0, self.trajectory_id, 0, 4)

    def goes(self, attempt: int, source: int, destination: int) -> None:
        drawn, spans = columns([1, 2, 3, 4], [-1.0] * 4), [VersionSpan(0, 0, 4)]
        partial = Partial(*drawn, spans, 1.0, attempt, True, self.name)
        given = self.moves(self.trajectory_id, attempt, source, destination, partial)
        assert given.awaits == self.name

    def known(self, attempt: int) -> Partial | None:
        return self.script.known(self.trajectory_id, attempt)


@pytest.fixture
def moving(tmp_path: Path) -> Moving:
    return Moving(tmp_path)


def test_it_goes_to_the_present_owner(moving: Moving) -> None:
    """Of two moves only the last destination hears it, and the pool has it: whoever goes on from there begins
    behind the calls."""
    moving.goes(0, 0, 1)
    moving.goes(1, 1, 2)
    answer = Answer(moving.trajectory_id, moving.name, GIVEN, 1, 0.5)
    moving.script.hear("rollout", 0, answer)
    assert moving.sent(2, Answer) == [answer] and not moving.sent(1, Answer)
    known = moving.known(2)
    assert known is not None and not known.called and not known.awaits and known.trained == 4
    assert np.frombuffer(known.tokens, "<i4").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert np.frombuffer(known.logprobs, "<f4").tolist() == [-1.0] * 4 + [0.0] * 3
    moving.script.hear("rollout", 0, answer)
    again = moving.known(2)
    assert again is not None and again.count == 7, "said twice, it counts once"


def test_the_replica_that_makes_the_calls_is_lost(moving: Moving) -> None:
    """Its owner is told so, and what is known of the trajectory does not pretend that an Answer will come."""
    moving.goes(0, 0, 1)
    moving.script.dies(0)
    (told,) = moving.sent(1, Answer)
    assert told.name == moving.name and "replica 0 was lost while it made its calls" in told.error
    known = moving.known(1)
    assert known is not None and known.called and not known.awaits


@pytest.mark.parametrize("early", [False, True])
def test_the_owner_is_lost_while_it_waits(moving: Moving, early: bool) -> None:
    """Another one goes on with what is known: it still awaits the Answer, which then goes there; also if that
    comes while the trajectory is on its way."""
    moving.goes(0, 0, 1)
    moving.script.dies(1)
    failover, reserve, partial = moving.take(moving.trajectory_id, (0, 2))
    assert partial.called and partial.awaits == moving.name
    answer = Answer(moving.trajectory_id, moving.name, GIVEN)
    if early:
        moving.script.hear("rollout", 0, answer)
    moving.script.hear("rollout", failover, Imported(reserve.move_id, 0))
    if not early:
        moving.script.hear("rollout", 0, answer)
    known = moving.known(2)
    assert known is not None and known.count == 7 and not known.awaits
    assert [a.name for a in moving.sent(failover, Answer)] == [moving.name]


def test_a_replica_that_only_waits_is_emptied(tmp_path: Path) -> None:
    """Two replicas whose trajectories wait for tools, with little or nothing in their engines' KV caches: one
    is emptied into the other, as soon as there is work for it."""
    moving = Moving(tmp_path)
    script = moving.script
    script.grants_nothing_new()

    def report(replica: int, waiting: int) -> None:
        engine = {"kv_capacity": 10_000, "kv_tokens": 0 if waiting == 4 else 100, "decode_curve": [(64, 1.0)]}
        load = ReplicaLoad("draining", 0, 4, 0, waiting=waiting, waiting_tokens=100 * waiting, **engine)
        script.hear("rollout", replica, Ping(load))

    for waiting, begun in ((2, False), (4, False), (4, True)):
        if begun:
            script.grants_nothing_new(False)
        for replica in range(2):
            report(replica, waiting)
        script.controller.repacker.consolidate(time.monotonic())
        script.controller.turn()
        assert bool(moving.sent(0, Reserve) or moving.sent(1, Reserve)) == begun
