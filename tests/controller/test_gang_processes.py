"""A real controller with roles apart and scripted trainers over real channels: a trainer generation that
loses a rank, one that is stuck, and zombies that go on speaking."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar_hpc.line.agent_line import FAILED_ELSEWHERE
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.endings import TrainersReplaced
from laminar_hpc.line.messages.chain import CutLink, EpochProposed, JoinEpoch, StoreOpened
from laminar_hpc.line.messages.membership import Failure, Hello, TrainerProgress
from laminar_hpc.line.messages.publication import NewWeightId, WeightId
from laminar_hpc.line.messages.training import NotYet, Restored, StepDone, TakeBatch
from laminar_hpc.store.checkpoints import newest_trainer_generation

HEARTBEAT = 3.0
STUCK = """
import ctypes, os, sys
from pathlib import Path
from laminar_hpc.launch.leaving import leave_at_once
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.messages.membership import Hello
channel = Channel(Path(sys.argv[1]), Hello("trainer", 1, "stuck", os.getpid(), "elsewhere"), 30, 30)
channel.when_replaced = leave_at_once
ctypes.CDLL(None).sleep(100)
"""


class Apart:
    """The controller's process; the test is its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.channels = folder, list[Channel]()
        words = ["experiment=demo", "role=controller", "trainer.data_parallel=2", f"run_dir={folder}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laminar_hpc", *words, f"cluster.heartbeat_timeout_seconds={HEARTBEAT}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        )

    def join(self, role: str, index: int, life: str) -> Channel:
        channel = Channel(self.folder, Hello(role, index, life, os.getpid(), "elsewhere"), 30, 30)
        self.channels.append(channel)
        return channel

    def trainer_generation(self, life: str) -> tuple[Channel, Channel]:
        """Rank 1 comes first."""
        other = self.join("trainer", 1, life)
        return self.join("trainer", 0, life), other

    def records(self, kind: str) -> list[dict]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    apart = Apart(tmp_path / "run")
    yield apart
    for channel in apart.channels:
        channel.close(goodbye=False)
    apart.process.kill()
    apart.process.communicate()


def starts(first: Channel) -> int:
    """Says where it starts, and asks for a batch, which nobody generates; the id of its first weights."""
    first.send(Restored(None))
    weights = first.request(NewWeightId(0), WeightId, timeout=10, what="a weight id")
    assert isinstance(weights, WeightId)
    first.request(TakeBatch(0), NotYet, timeout=10, what="a reason to wait")
    return weights.weight_id


def told_to_leave(channel: Channel, seconds: float) -> str:
    with pytest.raises(TrainersReplaced) as told:
        channel.wait(Restored, timeout=seconds)
    return str(told.value)


@pytest.mark.slow
def test_gangs_replace_each_other_and_zombies_change_nothing(apart: Apart) -> None:
    """Promise: docs/promises.md#roles-apart. A rank falls silent: the other one is told to leave, the
    relay's link is cut, and nothing that the zombie says counts. The next trainer generation gets higher ids
    and a link of its own. That one is stuck: it is found by its progress, and a rank whose main thread hangs
    ends."""
    first, other = apart.trainer_generation("a")
    assert (first.welcome.trainer_generation, other.welcome.trainer_generation) == (1, 1)
    relay = apart.join("relay", 0, "r")
    assert starts(first) == 0
    proposed = first.wait(EpochProposed, timeout=10)
    assert isinstance(proposed, EpochProposed)
    first.send(StoreOpened(proposed.epoch, "127.0.0.1", 1))
    assert isinstance(relay.wait(JoinEpoch, timeout=10), JoinEpoch)

    other.close(goodbye=False)
    assert "generation 1 of trainers has ended: trainer 1" in told_to_leave(first, HEARTBEAT + 5)
    cut = relay.wait(CutLink, timeout=5)
    assert isinstance(cut, CutLink) and cut.epoch == proposed.epoch
    assert newest_trainer_generation(apart.folder) == 2, (
        "no checkpoint of the first trainer generation gets its name from here on"
    )
    for message in (StepDone(0, {}), NewWeightId(1), TakeBatch(1), StoreOpened(proposed.epoch, "x", 1)):
        first.send(message)
    assert relay.wait(JoinEpoch, timeout=1) is None
    with pytest.raises(TrainersReplaced, match="other trainers have taken the place"):
        apart.join("trainer", 0, "a")

    stuck = subprocess.Popen([sys.executable, "-c", STUCK, str(apart.folder)])
    try:
        first = apart.join("trainer", 0, "b")
        assert first.welcome.trainer_generation == 2 and starts(first) == 1, "ids go on rising"
        again = first.wait(EpochProposed, timeout=10)
        assert isinstance(again, EpochProposed) and again.epoch > proposed.epoch
        for count in range(3):
            first.tell_progress(TrainerProgress("train", count))
            time.sleep(1.1)  # a ping
        assert "has made no progress for" in told_to_leave(first, 20)
        assert stuck.wait(5) == FAILED_ELSEWHERE
    finally:
        stuck.kill()
        stuck.wait()

    first, other = apart.trainer_generation("c")
    assert (first.welcome.trainer_generation, other.welcome.trainer_generation) == (3, 3) and starts(
        first
    ) == 2
    assert not apart.records("step") and [r["gang"] for r in apart.records("gang_ended")] == [1, 2]
    first.send(Failure("enough", permanent=True))
    lines = apart.process.communicate(timeout=20)[0].splitlines()
    waits = [line for line in lines if "wait up to 300 s for trainers to start again" in line]
    assert len(waits) == 2 and "trainer 1 (pid" in waits[0] and "trainer 0 has made no progress" in waits[1]
