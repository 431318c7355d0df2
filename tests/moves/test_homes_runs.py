"""docs/promises.md#stays in whole runs on emulated engines: trajectories move, engines and replicas die,
and each response has the results of one environment, each once and in order, and that one's grade."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.emulated.stand import Shuffler, Stand
from helpers.emulated.turning import CALL, several_turns, trajectories
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.loop import Controller
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.rollout.worker import RolloutWorker
from laminar_hpc.simulator.emulation.fleet import EmulatedReplica
from laminar_hpc.store.payload.whole import Whole

TOOLBOX = """
import os, random, time

class Shelf:
    def reset(self, **row) -> None:
        self.name, self.looks = f"{os.getpid()}x{time.time_ns()}", 0

    def look(self, key: str) -> str:
        "Looks it up."
        self.looks += 1
        time.sleep(random.uniform(0.1, 0.5))
        return f"({self.name}.{self.looks})"

    def get_reward(self) -> dict:
        return {"reward": self.looks % 2, "accuracy": 1.0, "looks": self.looks}

def score(*, prompt, response, row):
    return 0.0
"""
Hurt = Callable[[Stand, int], None]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    config = several_turns(tmp_path, TOOLBOX)
    config.environment.tools, config.environment.factory = [], "turns_toolbox.Shelf"
    config.reward.function = ""
    return config


def assert_of_one_environment(config: RunConfig, whole: Whole) -> str:
    """One policy, and behind the calls what one environment gave, in its order; returns that one's name."""
    record, response = whole.record, whole.response
    assert {s.weight_id for s in response.spans} == {record.weight_id} and record.policies == 1
    text = TextDecoder(Path(config.model.path)).text(response.tokens.tolist(), specials=True)
    results = re.findall(r"<\|tool\|>\n\((.*?)\)<", text)
    assert len(results) == text.count(CALL + "<|end|>\n<|tool|>") == record.reward_parts["looks"]
    names = {result.partition(".")[0] for result in results}
    assert len(names) <= 1 and [int(result.partition(".")[2]) for result in results] == [
        *range(1, len(results) + 1)
    ]
    assert record.reward == len(results) % 2 and record.reward_parts["environment.tool_calls"] >= len(results)
    return names.pop() if names else f"none, {record.trajectory_id}"


async def _engine_dies(worker: RolloutWorker) -> None:
    worker.engines.current.die()  # type: ignore[attr-defined]


async def _ends(replica: EmulatedReplica) -> None:
    assert replica.worker is not None
    replica.worker._leave(LaminarError("it was killed"))


def engines(stand: Stand, replica: int) -> None:
    """Its environments live on."""
    worker = stand.replicas[replica].worker
    assert worker is not None
    stand.loop.run(_engine_dies(worker))


def replicas(stand: Stand, replica: int) -> None:
    """With its environments, and as the holder of others' trajectories."""
    stand.loop.run(_ends(stand.replicas[replica]))


@pytest.mark.slow
@pytest.mark.parametrize("hurt", [None, engines, replicas])
def test_moves_and_deaths(config: RunConfig, answers: list[Answer], hurt: Hurt | None) -> None:
    """Trajectories move all the time. Two engines, or two replicas, die when enough answers have gone from
    replica to replica: what is asked of environments that live on is answered, and the rest begins again."""
    shuffler, deaths = Shuffler(seed=5), list[int]()

    def each_turn(controller: Controller) -> None:
        shuffler(controller)
        due = hurt is not None and len(deaths) < 2 and len(answers) > 10 * (len(deaths) + 1)
        worker = stand.replicas[len(deaths)].worker if due else None
        if hurt is not None and worker is not None and worker.batch.waiting:
            deaths.append(len(answers))
            hurt(stand, len(deaths) - 1)

    stand = Stand(config, each_turn=each_turn)
    stand.run(300)
    found = trajectories(config)
    names = [assert_of_one_environment(config, whole) for whole in found]
    assert len(set(names)) == len(names), "no environment is in two responses"
    assert sum(whole.record.moves for whole in found) > 10 and len(deaths) == (0 if hurt is None else 2)
    busy = [whole.record.reward_parts["environment.busy_share"] for whole in found]
    assert 0 < max(busy) <= 1
    if hurt is None:
        assert not any(answer.error for answer in answers), [a.error for a in answers if a.error]
