"""rollout.replicas=MIN:MAX, message by message: who is asked for, who is let go, when, and what is said."""

import os
import time
from pathlib import Path

import pytest

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.controller.fleet import autoscaling
from laminar_hpc.controller.fleet.replica_starter import FailedCall
from laminar_hpc.line.messages.membership import Goodbye, Hello, Release
from laminar_hpc.line.messages.rollouts import Leaving
from laminar_hpc.machine.files import jsonl
from laminar_hpc.policies.scaling import Costs, Decision, ScalingWindow, rates

RECORD = {"response_tokens": 1000, "seconds": 1.0, "wait_seconds": 0.5}


class Noted:
    """A starter that notes what it is asked for; `fails`: what comes of it."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ended: list[str] = []
        self.fails: list[FailedCall] = []

    def start(self, count: int) -> None:
        self.asked.append(count)

    def stop(self, starter_id: str) -> None:
        self.ended.append(starter_id)

    def look(self) -> list[FailedCall]:
        found, self.fails = self.fails, []
        return found

    def close(self, is_final: bool) -> None: ...


class Wanted:
    """In the place of the policy: a target, once."""

    fewest = 2

    def __init__(self) -> None:
        self.target: int | None = None

    def decide(self, window: ScalingWindow, costs: Costs) -> Decision | None:
        target, self.target = self.target, None
        return None if target is None else Decision(target, 0.5, rates(window))


@pytest.fixture
def starter(monkeypatch):
    found = Noted()
    monkeypatch.setattr("laminar_hpc.controller.parts.starter_of", lambda _: found)
    for name, value in (("WINDOW_STEPS", 1), ("_LOOK_SECONDS", 0.0)):
        monkeypatch.setattr(autoscaling, name, value)
    return found


def begun(folder: Path, lines: list[str]) -> tuple[Script, Wanted]:
    """Two replicas of two to four are at work."""
    config = small_config(folder, steps=40, prompts=4, samples=2, max_staleness=0, local_batch_groups=2)
    config.rollout.replicas = "2:4"
    script, policy = Script(config, say=lines.append), Wanted()
    assert script.controller.autoscaling is not None
    script.controller.autoscaling._policy = policy  # type: ignore[assignment]
    script.working(2)
    return script, policy


def steps(script: Script, count: int = 4) -> None:
    """So many steps are done."""
    for _ in range(count):
        script.controller.training.newest_record = dict(RECORD)
        script.controller.turn()


def waiting(script: Script, index: int, starter_id: str = "") -> None:
    """One more replica, which has nothing to do as the staleness bound is reached."""
    hello = Hello("rollout", index, "", os.getpid(), "one", starter_id=starter_id or f"job_{index}")
    script.hear("rollout", index, hello)
    script.asks(index, 0)
    assert script.granted(index) is None


def test_more_are_asked_for_once(tmp_path, starter):
    """The decision is on record with its prediction, and asks for what is missing; while that is to come
    nothing more is asked. What two windows make when all are there stands beside the prediction."""
    lines = list[str]()
    script, policy = begun(tmp_path, lines)
    policy.target = 4
    steps(script)
    assert starter.asked == [2] and any("2 -> 4: trainer waits 50%" in line for line in lines)
    policy.target = 3
    steps(script)
    assert starter.asked == [2] and policy.target == 3
    script.joins(2)
    script.joins(3)
    policy.target = None
    steps(script, 8)
    (decision,) = jsonl.read(script.run_dir / "metrics.jsonl", "scaling")
    assert (decision["before"], decision["target"], decision["predicted_gain"]) == (2, 4, 0.5)
    (scaled,) = jsonl.read(script.run_dir / "metrics.jsonl", "scaled")
    assert (scaled["replicas"], scaled["measured_gain"]) == (4, 0.0) and scaled["predicted_gain"] > 0.5
    assert starter.asked == [2]


def test_who_has_no_work_is_let_go(tmp_path, starter):
    """Of four replicas the two that wait for work get Release and nothing more; those that work do not. When
    they have left, their places are let go, by the word that they came with."""
    lines = list[str]()
    script, policy = begun(tmp_path, lines)
    for index in (2, 3):
        waiting(script, index)
    policy.target = 2
    steps(script)
    script.controller.turn()
    assert [len(script.sent(index, Release)) for index in range(4)] == [0, 0, 1, 1]
    assert script.controller.active_replicas.replicas() == {0, 1} and starter.ended == []
    for index in (2, 3):
        script.hear("rollout", index, Leaving(), Goodbye())
    script.controller.turn()
    assert starter.ended == ["job_2", "job_3"] and starter.asked == []


def test_nobody_is_taken_from_work(tmp_path, starter):
    """All are at work: the decision lapses after some steps, and nobody is told to leave."""
    script, policy = begun(tmp_path, [])
    policy.target = 1
    steps(script, 20)
    assert not any(script.sent(index, Release) for index in range(2))
    assert script.controller.active_replicas.replicas() == {0, 1}


def test_one_that_dies_counts_as_let_go(tmp_path, starter):
    """Two of three are to go. One has no work and leaves, another one dies: a third one stays."""
    script, policy = begun(tmp_path, [])
    waiting(script, 2)
    policy.target = 1
    steps(script)
    assert len(script.sent(2, Release)) == 1
    script.dies(1)
    script.joins(3)  # and takes over what the dead one had
    waiting(script, 4)
    script.controller.turn()
    script.controller.turn()
    assert script.controller.active_replicas.replicas() == {0, 3, 4} and not script.sent(4, Release)


def test_a_place_of_two_is_let_go_with_the_second(tmp_path, starter):
    """A Slurm job with two replicas is not cancelled while one of them works."""
    script, policy = begun(tmp_path, [])
    for index in (2, 3):
        waiting(script, index, "job_7")
    policy.target = 3
    steps(script)
    script.controller.turn()
    script.hear("rollout", 3, Leaving(), Goodbye())
    script.controller.turn()
    assert starter.ended == [] and starter.here() >= {"job_7"}
    policy.target = 2
    steps(script)
    script.controller.turn()
    script.hear("rollout", 2, Leaving(), Goodbye())
    script.controller.turn()
    assert starter.ended == ["job_7"]


def test_one_that_dies_is_replaced(tmp_path, starter):
    """Below the smallest number; one that comes in its place and dies before it serves is followed by
    another later."""
    lines = list[str]()
    script, _ = begun(tmp_path, lines)
    script.dies(1)
    script.controller.turn()
    script.controller.turn()
    assert starter.asked == [1] and any("1 fewer than there are to be" in line for line in lines)
    script.rollout(2)
    script.controller.turn()
    script.dies(2)
    for _ in range(3):
        script.controller.turn()
    assert starter.asked == [1]
    script.controller.autoscaling._not_before = time.monotonic()
    script.controller.turn()
    assert starter.asked == [1, 1]


def test_a_call_that_fails_is_said_and_asked_again_later(tmp_path, starter):
    lines = list[str]()
    script, policy = begun(tmp_path, lines)
    policy.target = 3
    steps(script)
    starter.fails = [FailedCall("scale start 1 has ended with exit code 3: no nodes left", 1)]
    script.controller.turn()
    assert [line for line in lines if "no nodes left" in line] == [
        "replicas     scale start 1 has ended with exit code 3: no nodes left"
    ]
    (failed,) = jsonl.read(script.run_dir / "metrics.jsonl", "scale_failed")
    assert failed["replicas"] == 1
    policy.target = 3
    steps(script, 6)
    assert starter.asked == [1]
    script.controller.autoscaling._not_before = time.monotonic()
    steps(script, 6)
    assert starter.asked == [1, 1]
