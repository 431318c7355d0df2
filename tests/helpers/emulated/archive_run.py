"""A run as the archive sees it: a real store, real payload files and checkpoints' folders, steps that are
generated and trained at once."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from helpers.made import Made
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import ScorePart
from laminar_hpc.store.archiving import Archiving
from laminar_hpc.store.checkpoints import checkpoint_path, steps
from laminar_hpc.store.gone_writers import GoneWriters
from laminar_hpc.store.journal import Journal
from laminar_hpc.store.payload.layout import pack
from laminar_hpc.store.payload.writer import FOLDER, PayloadWriter
from laminar_hpc.store.store import Store

GROUPS, SAMPLES, KEEP = 2, 2, 2  # groups of a step, trajectories of a group, checkpoints


class EmulatedRun:
    """`said`: lines for the user."""

    def __init__(
        self,
        run_dir: Path,
        rule: str = "all",
        tokens: int = 50,
        every: int = 2,
        store_dir: Path | None = None,
    ) -> None:
        self.run_dir, self.tokens, self.every = run_dir, tokens, every
        self.said: list[str] = []
        self.state = SimpleNamespace(trainer_step=0)
        self.rule = rule
        self.writer = PayloadWriter(run_dir, "rollout0")
        self.store = Store(run_dir) if store_dir is None else self._store_apart(store_dir)
        self.gone = GoneWriters(run_dir, False, 60.0, 0.0)
        self.archiving = _archiving(run_dir, rule, self.store, self.gone, self.said)

    def _store_apart(self, store_dir: Path) -> Store:
        journal = Journal(self.run_dir / "journal", store_dir / "store.sqlite", self.said.append)
        return Store(store_dir, journal=journal)

    def made(self, step: int, number: int) -> Made:
        """Trajectory `number` of a step; others with each step."""
        trajectory_id = step * GROUPS * SAMPLES + number
        tokens = np.random.default_rng(trajectory_id).integers(0, 1000, self.tokens)
        group, logprobs = trajectory_id // SAMPLES, (-(tokens + 1) / 1024).tolist()
        return Made(trajectory_id, group, [group % 100] * 5, tokens.tolist(), logprobs, weight_step=step)

    def train(self, count: int = 1) -> None:
        """So many steps more, and what the archive has to do afterwards."""
        for step in range(self.state.trainer_step, self.state.trainer_step + count):
            self._generate(step)
            self.store.rows.consume(range(step * GROUPS, (step + 1) * GROUPS), step)
            self.state.trainer_step = step + 1
            if (step + 1) % self.every == 0:
                self.checkpoint(step + 1)
            self.settle()

    def _generate(self, step: int) -> None:
        batch = [self.made(step, number) for number in range(GROUPS * SAMPLES)]
        places = [self.writer.append(pack(made.response)) for made in batch]
        for made, place in zip(batch, places, strict=True):
            if made.trajectory_id % SAMPLES == 0:
                self.store.rows.add_group(made.group_id, 0, 0, step, made.group_id + 1, 1.0)
                self.store.rows.add_prompt(made.group_id, made.prompt_tokens)
            ids = range(made.trajectory_id, made.trajectory_id + 1)
            self.store.rows.add_trajectories(ids, made.group_id, made.trajectory_id % SAMPLES, 0, 0, step)
            self.store.rows.store_response(made.record(place.result(10.0)))
            self.store.rows.finish_trajectory(made.trajectory_id, ScorePart(3.0, 1.0), 1.0)
            self.store.rows.finish_group(made.group_id, step, made.group_id + 1, 2.0)

    def checkpoint(self, step: int) -> None:
        """Of the KEEP newest, and what is older goes."""
        folder = checkpoint_path(self.run_dir, step)
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        for old in steps(self.run_dir)[:-KEEP]:
            shutil.rmtree(checkpoint_path(self.run_dir, old))
        self.archiving.checkpointed()

    def settle(self, seconds: float = 30.0) -> None:
        """The loop's turns until the archive has nothing to do, or has failed."""
        deadline, said = time.monotonic() + seconds, len(self.said)
        while True:
            self.archiving.tick(self.state.trainer_step)
            self.store.commit()
            job = self.archiving._job
            if job is None and (self.archiving._done >= self._limit() or len(self.said) > said):
                return
            assert time.monotonic() < deadline, "the archive does not come to an end"
            if job is not None:
                job.exception(seconds)

    def _limit(self) -> int:
        return min(self.archiving._limit, self.state.trainer_step)

    def restore(self, step: int) -> None:
        """As trainers do that start on the weights of this step."""
        self.archiving.put_back(step)
        self.store.rows.restore(step)
        self.state.trainer_step = step
        self.store.commit()

    def again(self) -> "EmulatedRun":
        """Another controller over the same store."""
        self.store.close()
        other = EmulatedRun(self.run_dir, self.rule, self.tokens, self.every)
        other.state.trainer_step = self.state.trainer_step
        return other

    def payload_files(self) -> list[Path]:
        return sorted((self.run_dir / FOLDER).iterdir())


def _archiving(run_dir: Path, rule: str, store: Store, gone: GoneWriters, said: list[str]) -> Archiving:
    config = RunConfig(run_dir=str(run_dir), archive=rule)
    config.checkpoint.keep = KEEP
    return Archiving(config, store, gone, SimpleNamespace(write=lambda *_, **__: None), said.append)


def archive(run_dir: Path) -> None:
    """Two of three steps that a run has trained, as the controller does when two later checkpoints are
    there."""
    for step in (2, 3):
        checkpoint_path(run_dir, step).mkdir(parents=True, exist_ok=True)
        (checkpoint_path(run_dir, step) / "state.json").write_text(json.dumps({"step": step}))
    run = SimpleNamespace(said=[], state=SimpleNamespace(trainer_step=3), store=Store(run_dir))
    run.archiving = _archiving(run_dir, "all", run.store, GoneWriters(run_dir, False, 60.0, 0.0), run.said)
    run._limit = lambda: min(run.archiving._limit, 3)
    EmulatedRun.settle(run)
    assert not run.said and run.store.archived_steps == 2
    run.store.close()
