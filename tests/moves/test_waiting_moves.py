"""docs/promises.md#one-call in whole runs on emulated engines: trajectories move while they wait for
their tools, and engines die under them. What a tool has given stands in one response, once."""

import re
from collections import Counter
from pathlib import Path

import pytest

from helpers.emulated.stand import Shuffler, Stand
from helpers.emulated.turning import CALL, several_turns, trajectories
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.rollout.in_flight import State
from laminar_hpc.rollout.worker import RolloutWorker
from laminar_hpc.store.payload.whole import Whole

TOOLBOX = """
import asyncio, os, random, time

async def look(key: str) -> str:
    "Looks it up."
    given = f"{os.getpid()}.{time.time_ns()}"
    with open("begun.log", "a") as file:
        file.write(given + "\\n")
    await asyncio.sleep(random.uniform(0.2, 1.0))
    return f"({given})"

def score(*, prompt, response, row):
    return len(response) % 2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    return several_turns(tmp_path, TOOLBOX)


def given(config: RunConfig, whole: Whole) -> list[str]:
    """What its calls gave, as it stands in the response: one behind each call. It is of one policy."""
    record, response = whole.record, whole.response
    assert {s.weight_id for s in response.spans} == {record.weight_id} and record.policies == 1
    decoder = TextDecoder(Path(config.model.path))
    text = decoder.text(response.tokens.tolist(), specials=True)
    results = re.findall(r"<\|tool\|>\n\((.*?)\)<", text)
    assert len(results) == text.count(CALL + "<|end|>\n<|tool|>") == len(response.spans) - 1
    return results


def begun() -> Counter[str]:
    return Counter(Path("begun.log").read_text().split())


@pytest.mark.slow
def test_they_move_while_they_wait(config: RunConfig, answers: list[Answer]) -> None:
    """Each call is made once and its result is where its trajectory is, however often that has moved, and no
    trajectory begins again."""
    shuffler = Shuffler(seed=5)
    Stand(config, each_turn=shuffler).run(150)
    found = trajectories(config)
    assert Counter(each for whole in found for each in given(config, whole)) == begun()
    assert len({answer.name for answer in answers}) > 5 and not any(answer.error for answer in answers)
    assert sum(whole.record.moves for whole in found) > 20


@pytest.mark.slow
def test_engines_die_while_they_wait(config: RunConfig, answers: list[Answer]) -> None:
    """What waited goes on elsewhere behind its call, which went on and was made once; the replica goes on
    with another engine."""
    deaths: list[int] = []

    async def kill(replica: int, worker: RolloutWorker) -> None:
        works = list(worker.batch.trajectories.values())
        if sum(work.state is State.WAITING for work in works) >= 2 and any(work.request_id for work in works):
            deaths.append(replica)
            stand.engine(replica).die()

    def hurt(_: object) -> None:
        worker = stand.replicas[len(deaths)].worker if len(deaths) < config.rollout.replicas - 1 else None
        if worker is not None:
            stand.loop.run(kill(len(deaths), worker))

    stand = Stand(config, each_turn=hurt)
    stand.run(150)
    found = {whole.record.trajectory_id: whole for whole in trajectories(config)}
    results = Counter(each for whole in found.values() for each in given(config, whole))
    assert len(deaths) == 2 and answers and stand.lives == config.rollout.replicas
    assert results == begun()
    waited = {answer.trajectory_id for answer in answers}
    assert waited and all(found[trajectory_id].record.attempt > 0 for trajectory_id in waited)
