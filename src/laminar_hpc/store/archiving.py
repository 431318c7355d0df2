"""When trained responses leave the payload files for the archive, and when they come back. The work itself is
that of a thread (archiver.py); the store is written here, in the loop.

A restore goes to one of the `checkpoint.keep` newest checkpoints, unless they are damaged or gone. A step is
archived when all of these are later: no such restore turns what it trained back into what is to be trained.
Where another one does, the responses are brought back from the archive first, or the run ends with a line
that says what is not there any more.

    Checkpointed -> limit -> archiver.begin(step) ... done -> the store forgets places and prompts; next step
    Restored     -> put_back(step), before the store goes back
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import replays, route_shape
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.observability.console import line
from laminar_hpc.machine.observability.metrics import MetricsWriter
from laminar_hpc.store import checkpoints, put_back
from laminar_hpc.store.archive import files
from laminar_hpc.store.archiver import Archived, Archiver
from laminar_hpc.store.gone_writers import GoneWriters
from laminar_hpc.store.payload.layout import DamagedResponse
from laminar_hpc.store.payload.writer import PayloadWriter
from laminar_hpc.store.store import Store

_AGAIN_SECONDS = 60.0  # after a failure
_CLOSE_SECONDS = 10.0


class Archiving:
    """Belongs to a run that generates: a replay archives nothing."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        gone: GoneWriters,
        metrics: MetricsWriter,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._store = store
        self._gone = gone
        self._metrics = metrics
        self._say = say
        self._run_dir = Path(config.run_dir)
        self._archiver = Archiver(store.path, store.run_dir, self._run_dir, config.archive)
        self._done = store.archived_steps
        self._job: Future[Archived] | None = None
        self._not_before = 0.0
        self._limit = 0
        self.at_work: Callable[[], None] = lambda: None  # called while a turn puts responses back
        self._trims = True  # whether the store may have too many rows
        self.checkpointed()

    def checkpointed(self) -> None:
        """Another checkpoint may be whole."""
        found = checkpoints.steps(self._run_dir)
        keep = self._config.checkpoint.keep
        self._limit = found[-keep] if len(found) >= keep else 0

    def tick(self, trainer_step: int) -> None:
        """Takes what the thread has done, and gives it the next of the trainers' `trainer_step` steps."""
        self._work(trainer_step)
        self._gone.tick(time.monotonic())  # of this turn, for the jobs after its commit

    def _work(self, trainer_step: int) -> None:
        if self._job is not None and self._job.done():
            job = self._job
            self._job = None
            self._take(job)
            return  # the next step begins when this is committed
        self._trims = self._trims and self._store.old_steps.trim(self._done)
        todo = self._done < min(self._limit, trainer_step)
        if todo and self._job is None and time.monotonic() >= self._not_before:
            self._job = self._archiver.begin(self._done, self._gone.gone())

    def _take(self, job: "Future[Archived]") -> None:
        try:
            done = job.result()
        except (OSError, LaminarError, sqlite3.Error, DamagedResponse) as error:
            self._not_before = time.monotonic() + _AGAIN_SECONDS
            text = f"step {self._done + 1} could not be archived, and its responses stay: {error}"
            self._say(line("warning", text))
            return
        if done.step != self._done or done.groups != self._store.rows.consumed_groups(done.step):
            return  # the run went back meanwhile
        self._store.rows.forget_responses(done.trajectories, done.groups + done.given_up)
        self._done = self._done + 1
        self._trims = True
        self._store.archived_steps = self._done
        if done.digest:
            self._store.seals.seal_archived(self._done, done.digest)
        self._metrics.write(
            "archived",
            step=self._done,
            tokens=done.tokens,
            bytes=done.bytes,
            trajectories=len(done.trajectories),
        )

    def put_back(self, step: int) -> None:
        """Before the store goes back to the weights of step `step`: what was archived of that step and later
        ones has its places again. Raises LaminarError where the archive does not have it, or not all that the
        trainer needs of it."""
        if step >= self._done:
            return
        gone = [s for s in range(step + 1, self._done + 1) if not files.path_of(self._run_dir, s).exists()]
        if gone:
            raise LaminarError(
                f"the trainers go back to step {step}, and what step {gone[0]} trained is not kept "
                f"(archive={self._config.archive}, {self._run_dir / files.FOLDER}): bring back a "
                "later checkpoint, or begin another run with this one's weights"
            )
        if replays(self._config) and route_shape(model_config(self._config.model.path)) is not None:
            raise LaminarError(
                f"the trainers go back to step {step}, and the archive has no routes of what step {step + 1} "
                "trained: bring back a later checkpoint, or set algorithm.routing_replay=false"
            )
        writer = PayloadWriter(self._store.run_dir, put_back.WRITER)
        try:
            for back in range(step + 1, self._done + 1):
                self._put_back(writer, back)
        finally:
            writer.close()
        self._store.old_steps.forget_sums(step)
        self._done = self._store.archived_steps = step

    def _put_back(self, writer: PayloadWriter, step: int) -> None:
        """Of trainer step `step`, from 1. A file has the samples of a group in their order."""
        samples = Counter[int]()
        for whole, place in put_back.put_back(writer, files.path_of(self._run_dir, step)):
            record = whole.record
            self._store.old_steps.bring_back(record, samples[record.group_id], step - 1)
            self._store.rows.put_back(record.trajectory_id, place)
            if not samples[record.group_id]:
                self._store.rows.add_prompt(record.group_id, whole.prompt.tolist())
            samples[record.group_id] += 1
            self.at_work()

    def close(self) -> None:
        """Lets a job under way end, for some seconds."""
        self._archiver.close(_CLOSE_SECONDS)
