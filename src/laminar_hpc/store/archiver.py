"""The thread that archives: beside the controller's loop, with a connection of its own to the store, which it
only reads. What it has done the loop (archiving.py) writes into the store.

A step's responses are read from the payload files in parts and go into one Parquet file. A payload file of
which the store has no place any more is removed.
"""

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.policies.retention import kept
from laminar_hpc.store.archive import files
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.payload.writer import FOLDER as PAYLOADS
from laminar_hpc.store.rows import Rows, stored_groups
from laminar_hpc.store.store_layout import connect_read_only

_PART_BYTES = 64 << 20  # of payloads that are in memory at once


@dataclass
class Archived:
    """What became of step `step`, from 0, and what the store can let go of."""

    step: int
    groups: list[int] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)  # groups that are not archived
    trajectories: list[int] = field(default_factory=list)  # of all of these
    tokens: int = 0
    bytes: int = 0  # 0 where the file is not kept
    digest: str = ""  # its SHA-256


class Archiver:
    """One job at a time. `store`: the database; `payloads`: the run directory of its payload files."""

    def __init__(self, store: Path, payloads: Path, run_dir: Path, rule: str) -> None:
        self._store = store
        self._payloads = payloads
        self._run_dir = run_dir
        self._rule = rule
        self._thread: threading.Thread | None = None

    def begin(self, step: int, gone: Callable[[str], bool]) -> "Future[Archived]":
        """Archives the batch of step `step`, from 0; before, removes payload files that nobody needs; `gone`:
        as for remove_empty. Errors are of the disk (OSError), a payload (LaminarError, Damaged), or the store
        (sqlite3.Error)."""
        future: Future[Archived] = Future()
        job = (step, gone, future)
        self._thread = threading.Thread(target=self._run, args=job, name="archive", daemon=True)
        self._thread.start()
        return future

    def close(self, seconds: float) -> None:
        """Waits so long for the job under way; one that is not done is begun anew by the next controller."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, step: int, gone: Callable[[str], bool], future: "Future[Archived]") -> None:
        try:
            with closing(connect_read_only(self._store)) as db:
                remove_empty(db, self._payloads / PAYLOADS, gone)
                future.set_result(self._archive(db, step))
        except BaseException as error:
            future.set_exception(error)

    def _archive(self, db: sqlite3.Connection, step: int) -> Archived:
        done = Archived(step)
        done.groups = Rows(db).consumed_groups(step)
        self._add_given_up(db, done)
        if kept(self._rule, step + 1, step + 1):
            done.bytes, done.digest = files.write(self._run_dir, step + 1, self._parts(db, done))
        else:
            stored = stored_groups(db, done.groups)
            done.trajectories += [t.trajectory_id for group in stored for t in group.trajectories]
        files.prune(self._run_dir, self._rule, step + 1)
        return done

    def _add_given_up(self, db: sqlite3.Connection, done: Archived) -> None:
        """Groups that were given up before, which nobody will ever train."""
        sql = (
            "SELECT group_id FROM prompts JOIN groups ON id = group_id "
            "WHERE state = 'given_up' AND group_id <= ?"
        )
        done.given_up = [group for (group,) in db.execute(sql, (max(done.groups, default=-1),))]
        for group_id in done.given_up:
            rows = db.execute("SELECT id FROM trajectories WHERE group_id = ?", (group_id,))
            done.trajectories += [i for (i,) in rows]

    def _parts(self, db: sqlite3.Connection, done: Archived) -> Iterator[list[Whole]]:
        part, size = list[BatchGroup](), 0
        for group_id in done.groups:
            for group in stored_groups(db, [group_id]):
                part.append(group)
                size += sum(t.place.size for t in group.trajectories if t.place)
                done.trajectories += [t.trajectory_id for t in group.trajectories]
                done.tokens += sum(t.length for t in group.trajectories)
            if size >= _PART_BYTES:
                yield wholes(self._payloads, part)
                part, size = [], 0
        if part:
            yield wholes(self._payloads, part)


def remove_empty(db: sqlite3.Connection, folder: Path, gone: Callable[[str], bool]) -> int:
    """Removes payload files in which no response has its place any more; how many. A rollout writes its files
    one after the other and speaks of them in that order: one is over when the store knows a later one, or
    when its writer is `gone` and all that it has said is in the store."""
    used = {file for (file,) in db.execute("SELECT DISTINCT file FROM responses")}
    newest: dict[str, int] = defaultdict(lambda: -1)
    for file in used:
        writer, _, number = file.rpartition(".")
        newest[writer] = max(newest[writer], int(number))
    count = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        writer, _, number = path.name.rpartition(".")
        is_over = number.isdigit() and (int(number) < newest[writer] or gone(writer))
        if path.name not in used and is_over:
            path.unlink(missing_ok=True)
            count += 1
    return count
