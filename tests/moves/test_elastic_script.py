"""docs/promises.md#come-and-go: who numbers rollouts, and how much each of them is given while they come
and go."""

import os
import time

import pytest

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import UNNUMBERED, Failure, Goodbye, Hello, Ping, Rejoin, Welcome
from laminar_hpc.line.messages.rollouts import EngineHung, Grant, Leaving

GROUPS = 12


def new(tmp_path, replicas: int = 2, minimum: int | None = None, **pipeline: object) -> Script:
    config = small_config(tmp_path, replicas, steps=20, prompts=GROUPS, samples=2, **pipeline)
    config.rollout.replicas_min = minimum
    return Script(config)


def answers(script: Script, life: str) -> list[Message]:
    """All that was said to the process that came without a number, since the last look."""
    sent = script.hub.left.setdefault(f"rollout:{UNNUMBERED}:{life}", [])
    found = list(sent)
    sent.clear()
    return found


def hello(index: int, life: str) -> Hello:
    return Hello("rollout", index, life, os.getpid(), "one")


def joins(script: Script, life: str, index: int = UNNUMBERED) -> int:
    """The number in its Welcome."""
    script.hear("rollout", UNNUMBERED, hello(index, life), life=life)
    (welcome,) = [message for message in answers(script, life) if isinstance(message, Welcome)]
    return welcome.index


def test_the_controller_numbers_rollouts(tmp_path):
    """From 0; the same for a Hello that is said twice; never one that was given before; and one that is taken
    for dead, or meets the next controller, keeps its own."""
    script = new(tmp_path)
    assert [joins(script, life) for life in "aba"] == [0, 1, 0]
    script.hear("rollout", UNNUMBERED, Goodbye(), life="b")
    assert joins(script, "c") == 2
    assert sorted(member.name for member in script.controller.members.all("rollout")) == [
        "rollout 0",
        "rollout 2",
    ]
    member = script.controller.members.at("rollout", 0)
    assert member is not None
    script.controller.members.leave(member)  # it was silent for too long
    script.hear("rollout", UNNUMBERED, Ping(), life="a")
    assert [type(message) for message in answers(script, "a")] == [Rejoin]
    assert joins(script, "a", 0) == 0
    later = script.again()
    assert joins(later, "d") == 3
    assert [joins(later, "c", 2), joins(later, "a", 0)] == [2, 0]
    later.rollout(7)  # as in one world, by its rank
    assert joins(later, "e") == 8
    later.closes()


def test_only_rollouts_come_without_a_number(tmp_path):
    """And no live process loses its own."""
    script = new(tmp_path)
    script.hear("relay", UNNUMBERED, Hello("relay", UNNUMBERED, "x", os.getpid(), "one"), life="x")
    (refusal,) = script.hub.left[f"relay:{UNNUMBERED}:x"]
    assert isinstance(refusal, Failure) and "no place in this run" in refusal.text
    assert joins(script, "a") == 0
    script.hear("rollout", UNNUMBERED, Hello("rollout", 0, "b", 1, "one"), life="b")
    (rival,) = answers(script, "b")
    assert isinstance(rival, Failure) and "rollout 0 is in this run already" in rival.text
    assert "first_index" not in rival.text
    script.closes()


def test_one_that_was_away_for_too_long_may_not_come_back(tmp_path):
    """Its last payload files may be gone; one that is back in time goes on."""
    script = new(tmp_path)
    assert [joins(script, life) for life in "ab"] == [0, 1]
    controller, now = script.controller, time.monotonic()
    for number in (0, 1):
        member = controller.members.at("rollout", number)
        controller.membership._leave(member)  # it was silent for too long
    assert joins(script, "a", 0) == 0
    cluster = controller.config.cluster
    controller.gone.tick(now + cluster.join_timeout_seconds + cluster.heartbeat_timeout_seconds + 60.0)
    script.hear("rollout", UNNUMBERED, hello(1, "b"), life="b")
    (refusal,) = answers(script, "b")
    assert isinstance(refusal, Failure) and "rollout 1 was away for so long" in refusal.text
    assert joins(script, "a", 0) == 0 and joins(script, "c") == 2
    script.closes()


def asks(script: Script, index: int, grant: Grant | None = None) -> Grant | None:
    """What a replica on the newest weights is given when it asks for work after this grant."""
    script.asks(index, script.newest, grant.batch_id if grant else None)
    return script.granted(index)


def size(grant: Grant | None) -> int:
    return len(grant.groups) if grant else 0


def test_local_batches_are_sized_by_who_is_there(tmp_path):
    """Of two, of one that is left, of three though two are configured. One whose engine still loads counts
    with its first weights."""
    script = new(tmp_path, local_batch_groups=None)
    for index in (0, 1):
        script.rollout(index)
    script.publish(0, 0)
    first, second = asks(script, 0), asks(script, 1)
    assert first is not None and size(first) == size(second) == GROUPS // 2
    script.hear("rollout", 1, Leaving())
    alone = asks(script, 0, first)
    assert size(alone) == GROUPS
    script.hear("rollout", 1, Goodbye())
    for index in (2, 3):
        script.rollout(index)
    alone = asks(script, 0, alone)
    assert size(alone) == GROUPS, "the others only load"
    assert size(asks(script, 2)) == GROUPS // 2
    assert size(asks(script, 3)) == GROUPS // 3
    script.hear("rollout", 3, EngineHung("it stands still"))
    assert size(asks(script, 0, alone)) == GROUPS // 2
    script.closes()


@pytest.mark.parametrize(("minimum", "expected"), [(None, GROUPS // 4), (3, GROUPS // 3), (1, GROUPS)])
def test_at_the_start_the_minimum_counts_as_there(tmp_path, minimum, expected):
    """So that the first one to come does not take the work of all; once so many have been there, those who
    are there count."""
    script = new(tmp_path, replicas=4, minimum=minimum)
    script.publish(0, 0)
    script.rollout(0)
    assert script.controller.active_replicas.minimum == (minimum or 4)
    first = asks(script, 0)
    assert size(first) == expected
    for index in (1, 2, 3):
        script.rollout(index)
    assert script.controller.active_replicas.minimum == 1
    assert size(asks(script, 0, first)) == GROUPS
    script.closes()


def test_a_round_does_not_wait_for_one_that_has_left_for_good(tmp_path):
    """refresh=barrier: the one that is left goes on alone; one that comes later takes part from its first
    weights on."""
    script = new(tmp_path, refresh="barrier", max_staleness=1)
    for index in (0, 1):
        script.rollout(index)
    script.publish(0, 0)
    assert asks(script, 0) is None, "the round waits for the other one"
    second, first = asks(script, 1), script.granted(0)
    assert size(first) == size(second) == GROUPS // 2
    script.dies(1)
    again = asks(script, 0, first)
    assert again is not None and size(again) == GROUPS
    script.rollout(2)
    script.controller.replicas.waiting.leave(0)
    assert asks(script, 2) is None, "the round waits for replica 0"
    script.closes()
