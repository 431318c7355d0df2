"""A rollout's own payload files: responses one after the other in RUN_DIR/payloads, each on the disk before
anybody is told of it.

    append(record) -> the thread gathers and writes, syncs once -> the future has the record's place

A file has one writer in one process life and is never opened again for writing. So after a death, bytes
behind the last reported place belong to nobody. What a full disk has cut off is cut away here.
"""

import errno
import logging
import os
import queue
import secrets
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.machine.files.durable import sync_folder

log = logging.getLogger(__name__)
FOLDER = "payloads"  # in the run directory
_FILE_BYTES = 64 << 20  # about: then the next file begins, so that old ones can be removed
_SLOW_SECONDS = 10.0  # beyond, a write is told of
_CLOSE_SECONDS = 5.0  # for what is being written
# Behind the first of a crowd of responses: one sync for all of them, and no switch of threads for each.
_GATHER_SECONDS = 0.01
_LOOK_SECONDS = 1.0  # for room on a full disk


class _Item(NamedTuple):
    """What is to be written, and who waits for its place."""

    record: bytes
    behind: bytes
    future: "Future[ResponsePlace]"


class PayloadWriter:
    """`append` never waits; its first call starts the thread. `name` names the writer, as rollout3.
    `patience`: seconds for which the thread waits for room on a full disk, and all later records with it."""

    def __init__(self, run_dir: Path, name: str, patience: float = 0.0) -> None:
        self._folder = run_dir / FOLDER
        self._name = f"{name}_{secrets.token_hex(4)}"
        self._patience = patience
        self._waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._file = -1
        self._path = Path()
        self._number = 0  # of the next file
        self._size = 0

    def append(self, record: bytes, behind: bytes = b"") -> "Future[ResponsePlace]":
        """The future gets the record's place once the record is on the disk, with what lies right behind it
        and is no part of its place. If it cannot be written, the future gets the OSError, and no byte of the
        record stays."""
        future: Future[ResponsePlace] = Future()
        self._waiting.put(_Item(record, behind, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="payloads", daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Writes what was appended before, if there is room."""
        self._closing.set()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            self._closing.wait(_GATHER_SECONDS)
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            self._write([item for item in batch if item is not None])
            if None in batch:
                break
        if self._file >= 0:
            os.close(self._file)

    def _write(self, batch: list["_Item"]) -> None:
        if not batch:
            return
        begun = time.monotonic()
        while True:
            try:
                places = self._places(batch)
                break
            except OSError as error:
                if not self._waits_for_room(error, begun):
                    for item in batch:
                        item.future.set_exception(error)
                    return
        if (seconds := time.monotonic() - begun) > _SLOW_SECONDS:
            log.warning("%s took %.0f s to write %d responses", self._folder, seconds, len(batch))
        for place, item in zip(places, batch, strict=True):
            item.future.set_result(place)

    def _places(self, batch: list["_Item"]) -> list[ResponsePlace]:
        """Puts all records on the disk; after an OSError none of them is there."""
        before, places = self._size, list[ResponsePlace]()
        try:
            if self._file < 0 or self._size >= _FILE_BYTES:
                self._begin_file()
                before = 0
            for item in batch:
                places.append(ResponsePlace(self._path.name, self._size, len(item.record)))
                self._put(item.record)
                self._put(item.behind)
            os.fdatasync(self._file)
        except OSError:
            self._cut(before)
            raise
        return places

    def _waits_for_room(self, error: OSError, begun: float) -> bool:
        """Waits a moment for room on the disk. Gives False when waiting is of no use."""
        waited = time.monotonic() - begun
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or waited >= self._patience:
            return False
        if waited < _LOOK_SECONDS:
            log.warning("%s waits for room on the disk: %s", self._folder, error)
        return not self._closing.wait(_LOOK_SECONDS)

    def _put(self, record: bytes) -> None:
        rest = memoryview(record)
        while rest:
            written = os.write(self._file, rest)
            rest = rest[written:]
            self._size = self._size + written

    def _begin_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._folder.mkdir(exist_ok=True)
        self._path = self._folder / f"{self._name}.{self._number:04d}"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._number += 1
        self._size = 0
        sync_folder(self._folder)

    def _cut(self, size: int) -> None:
        """Cuts off a write that failed: the next record begins where this one did."""
        if self._file >= 0:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            self._size = os.lseek(self._file, size, os.SEEK_SET)
