"""One rank of a real two-rank trainer world, started by test_data_parallel.py: `rank.py JOB.json`, with
torchrun's environment variables.

Runs trainer/loop.py as in a run, but rank 0's controller is a script: it hands out the job's batches and
notes what it is told.
"""

import json
import os
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from helpers import made
from helpers.trainer import tiny
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import TrainerProgress, Welcome
from laminar_hpc.line.messages.training import (
    Batch,
    Continue,
    Leave,
    NotYet,
    StepDone,
    TakeBatch,
    TrainersMeet,
)
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.trainer import loop


class ScriptedController:
    """In the place of the channel: answers TakeBatch with NotYet and the batch, StepDone with Continue, the
    last with Leave."""

    def __init__(self, job: dict, told: Path) -> None:
        self._job, self._told, self._answers = job, told, deque()
        self._run_dir = told.parent

    def tell_progress(self, progress: TrainerProgress) -> None:
        """Nobody watches here."""

    def send(self, message: Message) -> None:
        with open(self._told, "a") as file:
            file.write(msgspec.json.encode(message).decode() + "\n")
        if isinstance(message, TakeBatch):
            batch = tiny.make_batch(seed=100 + message.step, weight_step=message.step, **self._job["batch"])
            self._answers += [
                NotYet(message.step, "scripted"),
                Batch(message.step, made.groups(self._run_dir, batch), self._job["batch"]["samples"], ""),
            ]
        elif isinstance(message, StepDone):
            self._answers.append(
                Leave("scripted") if message.step + 1 == self._job["leave_after"] else Continue(message.step)
            )

    sessions = 0

    def flush(self) -> None: ...

    def when_failed(self, error: BaseException) -> None: ...

    def wait(self, *wanted: type, timeout: float, session: int) -> Message:
        answer = self._answers.popleft()
        assert isinstance(answer, wanted), answer
        return answer


class TrainersPlace:
    """In the place of another rank's channel: passes on where rank 0 has said that the trainers meet."""

    def __init__(self, told: Path) -> None:
        self._told = told

    def tell_progress(self, progress: TrainerProgress) -> None:
        """Nobody watches here."""

    def when_failed(self, error: BaseException) -> None: ...

    def wait(self, wanted: type, timeout: float) -> Message | None:
        assert wanted is TrainersMeet
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for line in self._told.read_bytes().splitlines() if self._told.exists() else []:
                if b"TrainersMeet" in line and line.endswith(b"}"):
                    return msgspec.json.decode(line, type=TrainersMeet)
            time.sleep(0.05)
        return None


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, run_dir = int(os.environ["RANK"]), Path(job["run_dir"])
    config = tiny.make_config(
        Path(job["model"]), source="replay:none", run_dir=str(run_dir), **job["settings"]
    )
    welcome = Welcome("test")
    told = run_dir / "told.jsonl"
    channel = ScriptedController(job, told) if rank == 0 else TrainersPlace(told)
    loop.run(
        RoleContext(
            config, "trainer", rank, "here", run_dir, channel, welcome, Trace(run_dir, "trainer", rank)
        )
    )


if __name__ == "__main__":
    main()
