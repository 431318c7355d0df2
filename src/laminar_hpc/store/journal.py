"""The journal of a store that lies on a local disk: its transactions on shared storage, so that the store can
be rebuilt on another machine. `Store` writes it; `store/recovery.py` brings store and journal together.

A logical log: each writing statement with its parameters. Beside shipping the frames of SQLite's own log it
takes less than half the bytes (no whole pages), never depends on when SQLite checkpoints, and can be read.
Its price, that a statement must give the same when it is executed again, is enforced: SQLite refuses random
numbers and the clock in a recorded connection, and a write outside a transaction is refused.

Order: a transaction is in the journal, synced, before it is committed. So after a death the store is at the
journal's end or one transaction before it, which nobody was told of; after a power cut some more, as the
commit is not synced too. The mark in the table `meta` says where it is.
"""

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from laminar_hpc.machine.files.durable import sync_folder
from laminar_hpc.machine.observability import console
from laminar_hpc.store.journal_files import (
    Position,
    SegmentHeader,
    claim_era,
    frame,
    newest_era,
    segment_name,
    segments,
    since,
    snapshot_name,
    snapshots,
)
from laminar_hpc.store.journal_watch import JournalWatch
from laminar_hpc.store.recorded import RecordedConnection
from laminar_hpc.store.store_layout import connect_read_only, meta

log = logging.getLogger(__name__)
FOLDER = "journal"
MARK = "journal"  # in the table meta: the Position of the store
RUN_DIR = "run_dir"  # in the table meta: the run that wrote it last
_SEGMENT_BYTES = 64 << 20
_SNAPSHOT_BYTES = 256 << 20  # of journal since the last snapshot, at least: what a rebuild has to replay
_SNAPSHOT_PAGES = 2048  # copied at once: 8 MiB
_CLOSE_SECONDS = 10.0  # for a snapshot under way to be given up
_encode = msgspec.msgpack.Encoder(enc_hook=lambda value: value.item()).encode  # numbers of numpy


class Journal:
    """Appends transactions in the folder, in an era of its own. Snapshots are taken by a thread beside it."""

    def __init__(
        self,
        folder: Path,
        store: Path,
        say: Callable[[str], None],
        era: int = 0,
        is_sure: Callable[[], bool] = lambda: True,
    ) -> None:
        """Writes nothing yet. `store` and journal have been brought together (`recovery.settle`). `era`: this
        controller's; 0: the next one. `is_sure`: whether it certainly has not been replaced."""
        self._folder = folder
        self._store = store
        self._say = say
        self._era = era
        self._position = Position()
        self._is_sure = is_sure
        self._file = -1
        self._statements: dict[str, int] = {}
        self._segment_bytes = 0
        taken = snapshots(folder)
        at = max((file.number for file in taken), default=0)
        self._bytes = sum(file.size for file in since(segments(folder), Position(0, at)))
        self._snapshot_bytes = max((file.size for file in taken), default=0)
        self._snapshot: threading.Thread | None = None
        self._failure: OSError | None = None
        self._closing = threading.Event()
        self._watch = JournalWatch(folder, say)

    @property
    def run_dir(self) -> Path:
        return self._folder.resolve().parent

    def append(self, db: RecordedConnection) -> None:
        """When this returns the open transaction is on the disk, and its number is part of it. Raises OSError
        when it cannot be written, and from then on."""
        if not db.written:
            return
        if self._failure:
            raise OSError(*self._failure.args)
        with self._watch:
            try:
                self._append(db)
            except OSError as error:  # what has been written of it is a torn end
                self._failure = error
                raise
        db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (MARK, str(self._position)))

    def _append(self, db: RecordedConnection) -> None:
        if self._file < 0:
            mark = position_of(db)
            self._era = self._era or claim_era(self._folder, mark.era)
            self._position = Position(self._era, mark.number, mark.checksum)
            self._begin_segment(db)
        if self._segment_bytes > _SEGMENT_BYTES or self._snapshot_is_due():
            self._begin_segment(db)
            if self._snapshot_is_due():
                self._begin_snapshot()
        new: list[str] = []
        calls = [(self._index(sql, new), parameters) for sql, parameters in db.written]
        before = self._position
        data, checksum = frame(before.number + 1, _encode((new, calls)), before.checksum)
        self._write(data)
        self._position = Position(self._era, before.number + 1, checksum)

    def _index(self, sql: str, new: list[str]) -> int:
        """The statement's number in this segment, which holds each text once."""
        if sql not in self._statements:
            self._statements[sql] = len(self._statements)
            new.append(sql)
        return self._statements[sql]

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        os.fdatasync(self._file)
        self._segment_bytes += len(data)
        self._bytes += len(data)

    def _begin_segment(self, db: sqlite3.Connection) -> None:
        """The next segment; nobody sees it without its header."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        name = segment_name(self._position)
        self._file = os.open(self._folder / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._segment_bytes = 0
        self._statements = {}
        header = SegmentHeader(meta(db, "store_id"), self._era, self._position.checksum)
        data, _ = frame(self._position.number, _encode(header), bytes(len(self._position.checksum)))
        self._write(data)
        (self._folder / f".{name}").rename(self._folder / name)
        sync_folder(self._folder)

    # ---- snapshots -----------------------------------------------------------------------------------------

    def _snapshot_is_due(self) -> bool:
        if self._snapshot is not None and self._snapshot.is_alive():
            return False
        return self._bytes > max(_SNAPSHOT_BYTES, self._snapshot_bytes)

    def _begin_snapshot(self) -> None:
        """It holds what is committed by now, so no segment before the present one is needed any more."""
        self._bytes = 0
        self._snapshot = threading.Thread(target=self._take_snapshot, name="snapshot", daemon=True)
        self._snapshot.start()

    def _take_snapshot(self) -> None:
        try:
            begun = time.monotonic()
            self._snapshot_bytes = take_snapshot(
                self._store, self._folder, self._closing, self._era, self._is_sure
            )
            text = "the journal has a snapshot of %s, made in %.1f s"
            log.info(text, console.size(self._snapshot_bytes), time.monotonic() - begun)
        except (OSError, sqlite3.Error) as error:
            if not self._closing.is_set():
                text = f"no snapshot of the store could be written to {self._folder} ({error})"
                self._say(console.line("warning", f"{text}: the journal grows until the next try"))

    def close(self) -> None:
        """Gives up a snapshot under way."""
        self._closing.set()
        self._watch.close()
        if self._snapshot is not None:
            self._snapshot.join(_CLOSE_SECONDS)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def position_of(db: sqlite3.Connection) -> Position:
    """Of the store that `db` is; the very beginning if it has no mark."""
    text = meta(db, MARK)
    return Position.parse(text) if text else Position()


def take_snapshot(
    store: Path, folder: Path, closing: threading.Event, era: int, is_sure: Callable[[], bool] = lambda: True
) -> int:
    """Copies what is committed into `folder`, then removes what it makes superfluous, if this controller is
    sure that no other one has begun to read without it. Returns its size.

    SQLite neither locks nor logs there, as a network file system can do neither. Raises OSError or
    sqlite3.Error, also when `closing` is set before it is whole or when a later `era` has begun."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".snapshot_{era:06d}"
    temporary.unlink(missing_ok=True)

    def proceed(*_: int) -> None:
        if closing.is_set() or newest_era(folder) > era:
            raise sqlite3.OperationalError("given up")

    try:
        uri = f"{temporary.resolve().as_uri()}?vfs=unix-none"
        with (
            contextlib.closing(connect_read_only(store)) as source,
            contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as target,
        ):
            source.execute("BEGIN")
            position = position_of(source)
            target.execute("PRAGMA journal_mode=OFF")
            target.execute("PRAGMA synchronous=OFF")
            source.backup(target, pages=_SNAPSHOT_PAGES, progress=proceed)
        with open(temporary, "rb+") as file:
            digest = file_digest(file)
            os.fsync(file.fileno())
        proceed()
        size = temporary.stat().st_size
        temporary.rename(folder / snapshot_name(position, digest))
        sync_folder(folder)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if is_sure():
        _remove_before(folder, position, era)
    return size


def file_digest(file: Any) -> str:
    """Of all that `file` holds from its present position."""
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _remove_before(folder: Path, position: Position, era: int) -> None:
    """What a rebuild from the newest snapshot, which is at `position`, does not read. Nothing until a file
    tells where `era` has begun: an earlier era may yet begin before that."""
    found = segments(folder)  # looked at once: a segment that begins meanwhile is in neither list
    if era not in (position.era, *(file.era for file in found)):
        return
    needed = {file.path for file in since(found, position)}
    for file in (*found, *snapshots(folder)[:-1]):
        if file.path not in needed:
            file.path.unlink(missing_ok=True)
    sync_folder(folder)
