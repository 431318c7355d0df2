"""Brings a store and its journal together before the store is opened: called at the controller's start.

    store                                   what is done
    missing, damaged or of no use           rebuilt from the newest snapshot and what came after it
    behind, on the journal's history        caught up
    ahead, written by the last controller   the journal has lost its end: begun anew, with a snapshot
    on a history that others did not go on  moved aside and rebuilt
    of another run                          refused, with both ids

A damaged journal is begun anew from a store that the last controller has left; without one it is refused.
"""

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import Refused
from laminar_hpc.machine.files.durable import sync_folder
from laminar_hpc.machine.observability import console
from laminar_hpc.store import journal_files as files
from laminar_hpc.store.full_disk import is_full_disk
from laminar_hpc.store.journal import MARK, RUN_DIR, position_of, take_snapshot
from laminar_hpc.store.journal_files import DamagedJournal, OtherHistory, Position
from laminar_hpc.store.rebuild import build, refusal, replay
from laminar_hpc.store.store_layout import connect_read_only, meta


@dataclass(frozen=True)
class StoreIdentity:
    """What a store file is known by."""

    store_id: str
    position: Position | None  # None: it was never written with a journal
    run_dir: str  # of the run that wrote it last, with a journal


def settle(folder: Path, store: Path, say: Callable[[str], None], damage: str = "", era: int = 0) -> None:
    """Afterwards the store is at the end of the journal, or neither holds anything. `damage`: what is known
    to be wrong with the store; `era`: of this controller, 0 for the next one. Raises Refused, with nothing
    changed, when they do not belong together or the journal cannot be read."""
    known, found = journal_id(folder), None if damage else identity(store)
    if not known:
        if found:
            _begin_anew(folder, store, say, "has no journal yet", era)
        elif not damage:
            for file in files.segments(folder):  # of a journal that never got its first transaction
                file.path.unlink()
    elif found and found.store_id != known:
        raise Refused([mixed_up(store, found.store_id, folder, known)])
    elif found is None or found.position is None:
        _rebuild(folder, store, say)
    else:
        _continue(folder, store, found.position, say, era)


def own_era(folder: Path, store: Path) -> int:
    """For a controller that goes on from them, or begins them: see `claim_era`."""
    found = identity(store)
    return files.claim_era(folder, found.position.era if found and found.position else 0)


def _continue(folder: Path, store: Path, position: Position, say: Callable[[str], None], era: int) -> None:
    """`store`, which has been written with this journal, goes on if it can."""
    last_writer = position.era >= files.newest_era(folder)
    snapshot = max((file.number for file in files.snapshots(folder)), default=0)
    segments = files.segments(folder)
    if snapshot > position.number:
        _rebuild(folder, store, say)
        return
    try:
        first = files.since(segments, Position(0, snapshot))
        if first and first[0].number > snapshot:
            raise DamagedJournal(first[0].path, 0, snapshot)  # those before it are gone
        if not files.since(segments, position) and snapshot != position.number:
            raise OtherHistory
        _catch_up(folder, store, position, say)
    except OtherHistory:
        if last_writer:
            _begin_anew(folder, store, say, "is ahead of its journal, which has lost its end", era)
        else:
            _rebuild(folder, store, say)
    except DamagedJournal as error:
        if not last_writer:
            raise Refused([refusal(folder, error, None)]) from None
        _begin_anew(folder, store, say, f"is whole and its journal is not ({error})", era)


def retire(folder: Path, store: Path, say: Callable[[str], None], damage: str = "") -> None:
    """From here on `store` has no journal: it gets what the present one knows, which is moved aside."""
    if folder.is_dir():
        settle(folder, store, say, damage)
        numbers = (folder.with_name(f"{folder.name}.{number}") for number in range(1, 100_000))
        folder.rename(next(name for name in numbers if not name.exists()))


def mixed_up(store: Path, store_id: str, folder: Path, known: str) -> str:
    """The refusal of a store beside the journal of another."""
    cure = f"set another store_dir or run_dir, or move {store} away if its run is gone"
    text = f"{store} is the store {store_id}, and {folder} the journal of the store {known}"
    return f"{text}: they belong to different runs; {cure}"


def journal_id(folder: Path) -> str:
    """The id of the store whose journal is there; "" if there is no transaction in it."""
    segments, snapshots = files.segments(folder), files.snapshots(folder)
    try:
        if segments and (snapshots or len(segments) > 1 or _has_transactions(segments[-1])):
            return files.Segment(segments[-1]).header.store_id
    except DamagedJournal as error:
        raise Refused([refusal(folder, error, None)]) from None
    if not snapshots:
        return ""
    found = identity(snapshots[-1].path)
    return found.store_id if found else ""


def _has_transactions(file: files.File) -> bool:
    return any(True for _ in files.Segment(file).transactions(None))


def identity(store: Path) -> StoreIdentity | None:
    """None where there is no database of a run: no file, an empty one, or a damaged one. Changes nothing."""
    if not store.is_file() or store.stat().st_size == 0:
        return None
    try:
        with closing(connect_read_only(store)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                return None
            store_id, position, run_dir = meta(db, "store_id"), position_of(db), meta(db, RUN_DIR)
    except sqlite3.DatabaseError as error:
        if is_full_disk(error):
            raise
        return None
    return StoreIdentity(store_id, position if position.number else None, run_dir)


# ---- the ways to bring them together -----------------------------------------------------------------------


def _opened(store: Path) -> closing[sqlite3.Connection]:
    db = sqlite3.connect(store, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    return closing(db)


def _catch_up(folder: Path, store: Path, start: Position, say: Callable[[str], None]) -> None:
    with _opened(store) as db:
        db.execute("BEGIN IMMEDIATE")
        count = replay(folder, db, start)[1]
        db.execute("COMMIT" if count else "ROLLBACK")
    if count:
        say(
            console.line(
                "set-up", f"{store} was behind its journal, and has its last {count} transactions again"
            )
        )


def _rebuild(folder: Path, store: Path, say: Callable[[str], None]) -> None:
    begun = time.monotonic()
    store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = store.with_name(f".{store.name}.rebuilt")
    try:
        position, count, read = build(folder, temporary)
        aside = move_aside(store)
        temporary.rename(store)
        sync_folder(store.parent)
    finally:
        temporary.unlink(missing_ok=True)
    seconds = time.monotonic() - begun
    what = (
        f"{store} was rebuilt from {folder}: transaction {position.number}, {count} since the last snapshot"
    )
    moved = f"; what was there is now {aside}" if aside else ""
    say(console.line("set-up", f"{what}, {console.size(read)} in {console.duration(seconds)}{moved}"))


def _begin_anew(folder: Path, store: Path, say: Callable[[str], None], why: str, era: int) -> None:
    """The store is the truth: the journal begins with a snapshot of it, in a new era."""
    begun = time.monotonic()
    with _opened(store) as db:
        known = max((f.number for f in (*files.segments(folder), *files.snapshots(folder))), default=0)
        mark = position_of(db)
        era = era or files.claim_era(folder, mark.era)
        position = Position(era, max(known, mark.number) + 1, os.urandom(8))
        db.execute("INSERT OR IGNORE INTO meta VALUES('store_id', ?)", (secrets.token_hex(8),))
        db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (MARK, str(position)))
        size = take_snapshot(store, folder, threading.Event(), position.era)
    seconds = console.duration(time.monotonic() - begun)
    text = f"{store} {why}: the journal begins with a snapshot, {console.size(size)} in {seconds}"
    say(console.line("set-up", text))


def move_aside(store: Path) -> Path | None:
    """Renames a store that is not gone on with, and its write-ahead log. None if there is none."""
    if not store.exists():
        return None
    names = (store.with_name(f"{store.stem}.{number}{store.suffix}") for number in range(1, 100_000))
    aside = next(name for name in names if not name.exists())
    rename(store, aside)
    return aside


def rename(store: Path, target: Path) -> None:
    """With its write-ahead log, if there is a store."""
    for suffix in ("-wal", "-shm", ""):  # what was committed last is in the first
        part = store.with_name(store.name + suffix)
        if part.exists():
            part.rename(target.with_name(target.name + suffix))
