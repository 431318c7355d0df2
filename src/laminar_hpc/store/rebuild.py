"""Makes a store from a journal: the newest snapshot, and what came after it executed again.

python -m laminar_hpc.store.rebuild RUN_DIR FILE      writes the store that the journal knows to FILE
"""

import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.store.journal import FOLDER, MARK, file_digest, position_of
from laminar_hpc.store.journal_files import DamagedJournal, File, OtherHistory, Position, read_after, segments
from laminar_hpc.store.journal_files import snapshots as snapshots_of

_calls = msgspec.msgpack.Decoder(list[tuple[int, Any]])


def build(folder: Path, target: Path) -> tuple[Position, int, int]:
    """Makes the store at `target` from the journal: its position, the transactions since the snapshot, and
    the bytes read. Raises Refused when the journal is damaged."""
    target.unlink(missing_ok=True)
    size, snapshots = 0, snapshots_of(folder)
    if snapshots:
        size = _copy_snapshot(folder, snapshots[-1], target)
    with closing(sqlite3.connect(target, isolation_level=None, cached_statements=512)) as db:
        db.execute("PRAGMA journal_mode=MEMORY")
        db.execute("PRAGMA synchronous=OFF")
        db.execute("BEGIN IMMEDIATE")
        try:
            start = position_of(db) if snapshots else Position()
            end, count, read = replay(folder, db, start)
        except DamagedJournal as error:
            raise Refused([refusal(folder, error, db)]) from None
        except OtherHistory:
            unknown = DamagedJournal(snapshots[-1].path if snapshots else folder, 0, 0)
            raise Refused([refusal(folder, unknown, None)]) from None
        db.execute("COMMIT")
    with open(target, "rb+") as file:
        os.fsync(file.fileno())
    return end, count, size + read


def _copy_snapshot(folder: Path, snapshot: File, target: Path) -> int:
    shutil.copyfile(snapshot.path, target)
    with open(target, "rb") as file:
        if file_digest(file) != snapshot.digest:
            error = DamagedJournal(snapshot.path, 0, 0)
            raise Refused([refusal(folder, error, None)])
    return snapshot.size


def replay(folder: Path, db: sqlite3.Connection, start: Position) -> tuple[Position, int, int]:
    """Executes what came after `start`: the end, the number of transactions and of bytes."""
    end, count, size = start, 0, 0
    try:
        for segment, calls in read_after(folder, start):
            for index, parameters in _calls.decode(calls):
                db.execute(segment.statements[index], parameters)
            end, count, size = segment.at, count + 1, size + len(calls)
    finally:
        if count:
            db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (MARK, str(end)))
    return end, count, size


def refusal(folder: Path, error: DamagedJournal, db: sqlite3.Connection | None) -> str:
    """With what the journal still tells, if `db` is a store that was rebuilt up to the damage."""
    number, step = error.number, None
    if db is not None and number:
        [(step,)] = db.execute("SELECT MAX(consumed_step) + 1 FROM groups WHERE state = 'consumed'")
    known = f"the run is known up to transaction {number}, step {step or 0}" if number else "nothing is known"
    return (
        f"{error}, and no store is here that knows what was in it: {known}. Restore that file or the store "
        f"from a copy; or move {folder} away and begin another run with a checkpoint's weights "
        "(model.path=CHECKPOINT/hf)"
    )


def main(run_dir: Path, target: Path) -> None:
    """Raises Refused when there is nothing to do it from, or when it would overwrite something."""
    folder = run_dir / FOLDER
    if target.exists():
        raise Refused([f"{target} exists; name another file"])
    if not segments(folder) and not snapshots_of(folder):
        raise Refused([f"{folder} holds no journal: only a run with store_dir has one"])
    try:
        position, count, _ = build(folder, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    print(f"{target}: transaction {position.number}, {count} since the last snapshot")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m laminar_hpc.store.rebuild RUN_DIR FILE")
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except (LaminarError, OSError) as error:
        sys.exit(str(error))
