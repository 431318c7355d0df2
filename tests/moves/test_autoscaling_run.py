"""rollout.replicas=MIN:MAX in a whole emulated run: replicas come when the trainer waits and leave when they
have no work, with what was predicted beside what was measured, and nothing is lost."""

import queue

import pytest

from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.controller.fleet import autoscaling
from laminar_hpc.controller.fleet.replica_starter import FailedCall
from laminar_hpc.controller.loop import Controller
from laminar_hpc.machine.files import jsonl
from laminar_hpc.simulator.emulation import stage


class InTheStand:
    """Starts replicas in the test's own process; `ended`: processes that were to end."""

    def __init__(self) -> None:
        self.stand: Stand | None = None
        self.ended: list[str] = []
        self.asked: list[int] = []

    def start(self, count: int) -> None:
        self.asked.append(count)
        assert self.stand is not None
        for _ in range(count):
            self.stand.join()

    def stop(self, place: str) -> None:
        self.ended.append(place)

    def look(self) -> list[FailedCall]:
        return []

    def close(self, is_final: bool) -> None: ...


class Pace:
    """Seconds that a trainer takes for each token, from a step on more."""

    def __init__(self, first: float, later: float, steps: int) -> None:
        self.first, self.later, self.steps, self.done = first, later, steps, 0

    def __rmul__(self, tokens: int) -> float:
        self.done += 1
        return tokens * (self.first if self.done <= self.steps else self.later)


@pytest.fixture
def starter(monkeypatch):
    found = InTheStand()
    monkeypatch.setattr("laminar_hpc.controller.parts.starter_of", lambda _: found)
    return found


@pytest.mark.slow
def test_a_run_grows_and_shrinks(tmp_path, monkeypatch, starter):
    """It begins with one replica and a trainer that waits for most of the time, and ends with a slow trainer:
    replicas are asked for and let go, each with nothing in hand, within the bounds; what was predicted stands
    beside what was measured; every trajectory is generated and trained once, and the audit is clean."""
    monkeypatch.setattr(autoscaling, "WINDOW_STEPS", 3)
    monkeypatch.setattr(autoscaling, "_DRAIN_SECONDS", 0.1)
    config = small_config(tmp_path, steps=34, prompts=4, samples=2, max_staleness=1)
    config.rollout.replicas, config.rollout.max_concurrent = "1:4", 1
    config.emulation.time_scale, config.emulation.sigma = 40.0, 0.3
    config.emulation.median_response_tokens = 100.0
    pace = Pace(1e-6, 0.022, 13)

    def trainer(config, _, handed: queue.SimpleQueue) -> None:
        stage.trainer(config, pace, handed)

    counts = set[int]()

    def watch(controller: Controller) -> None:
        counts.add(len(controller.active_replicas.replicas()))

    stand = starter.stand = Stand(config, trainer=trainer, each_turn=watch, lasting=0)
    stand.join()
    stand.run(60)
    assert_every_one_ended_once(config)
    assert max(counts) > 1 and max(counts) <= 4
    records = list(jsonl.read(tmp_path / "run" / "metrics.jsonl", "scaling"))
    grown, *_, shrunk = records
    assert grown["before"] == 1 and grown["target"] > 1 and grown["predicted_gain"] > 0.1
    assert shrunk["target"] < shrunk["before"] and abs(shrunk["predicted_gain"]) < 0.05
    scaled = list(jsonl.read(tmp_path / "run" / "metrics.jsonl", "scaled"))
    assert scaled and scaled[0]["before"] == 1
    assert not starter.ended, "all are of one process, which is not ended while any of them is there"
    assert any("is let go" in line for line in stand.lines)
