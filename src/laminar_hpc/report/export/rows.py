"""A run's scored trajectories one after the other, wherever they are: in the archive, or still in payload
files. Reads only, also of a live run, which may archive a step while it is read."""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.store.archive import files
from laminar_hpc.store.payload.layout import DamagedResponse
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rows import stored_groups
from laminar_hpc.store.store_layout import meta

_AT_ONCE = 16  # groups that are read together
Part = tuple[int | None, list[Whole]]  # the step that trained them, from 1


def parts(db: sqlite3.Connection, run_dir: Path, first: int, last: int | None) -> Iterator[Part]:
    """Of the steps `first` to `last`, both included, ascending; with `last` None also what no step has
    trained yet: as it was when the first part is asked for. `db`: in autocommit. Raises LaminarError for what
    cannot be read."""
    groups = defaultdict[int | None, list[int]](list)
    sql = "SELECT consumed_step + 1, id FROM groups WHERE state IN ('consumed', 'finished') ORDER BY 1, 2"
    for step, group in db.execute(sql):
        groups[step].append(group)
    waiting = groups.pop(None, [])
    for step, of_step in groups.items():
        if step and first <= step and (last is None or step <= last):
            for part in _of_step(db, run_dir, step, of_step):
                yield step, part
    if last is None:
        for part in _stored(db, run_dir, waiting):
            yield None, part


def lost(db: sqlite3.Connection, run_dir: Path, first: int, last: int | None) -> list[int]:
    """The steps in this range that trained something and are not kept any more."""
    archived, present = _archived_steps(db), set(files.steps(run_dir))
    end = archived if last is None else min(last, archived)
    return [step for step in range(max(1, first), end + 1) if step not in present]


def _archived_steps(db: sqlite3.Connection) -> int:
    return int(meta(db, "archived_steps") or 0)


def _of_step(db: sqlite3.Connection, run_dir: Path, step: int, groups: list[int]) -> Iterator[list[Whole]]:
    seen, archived = set[int](), step <= _archived_steps(db)
    if not archived:
        try:
            for part in _stored(db, run_dir, groups):
                seen |= {whole.record.trajectory_id for whole in part}
                yield part
        except LaminarError:  # of a copy of the store the archive's file alone tells
            archived = files.path_of(run_dir, step).exists()
            if not archived and step > _archived_steps(db):
                raise
    if archived or step <= _archived_steps(db):  # perhaps since a moment ago
        for part in _archived(run_dir, step):
            if new := [whole for whole in part if whole.record.trajectory_id not in seen]:
                yield new


def _archived(run_dir: Path, step: int) -> Iterator[list[Whole]]:
    path = files.path_of(run_dir, step)
    rows = files.read(path)
    try:
        while part := list(islice(rows, _AT_ONCE * 8)):
            yield part
    except FileNotFoundError:
        return
    except (OSError, DamagedResponse) as error:
        raise LaminarError(f"{path} cannot be read ({error}); look at it with laminar audit") from None


def _stored(db: sqlite3.Connection, run_dir: Path, groups: list[int]) -> Iterator[list[Whole]]:
    for begin in range(0, len(groups), _AT_ONCE):
        if found := stored_groups(db, groups[begin : begin + _AT_ONCE]):
            yield wholes(run_dir, found, late=0.0)
