"""The store's second copy: the pages of its file as of the last commit, in memory. If somebody else removes
or damages the file, it is made again from them.

A commit appends the pages that it has changed to the write-ahead log, each in a frame; the last frame holds
the size of the database (sqlite.org/fileformat2.html#walformat). To read the frames costs a tenth of what it
costs to execute the transaction's statements again, and needs no other thread.
"""

import os
import sqlite3
import struct
from pathlib import Path

import numpy as np

from laminar_hpc.machine.files import durable

_LOG_HEADER = struct.Struct(">8xI4x8s8x")  # page size, salt
_READ_FRAMES = 256  # at once; a longer transaction is read by more


def _frame_type(size: int) -> np.dtype:
    """`page`: its number from 1; `pages`: of the database, where a commit ends in this frame, else 0."""
    fields = [("page", ">u4"), ("pages", ">u4"), ("salt", "V8"), ("sums", "V8"), ("content", f"V{size}")]
    return np.dtype(fields)


class MemoryCopy:
    """Follows the store at `path`. Only `db` writes to it, and has no open transaction yet."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # opens the log
        self._log = os.open(path.with_name(f"{path.name}-wal"), os.O_RDONLY)
        self._salt = b""
        self._end = _LOG_HEADER.size
        self._frame = _frame_type(0)
        self._pages = bytearray()
        self.follow()  # past what an earlier controller has left in the log
        self._pages = bytearray(db.serialize() or b"")

    def follow(self) -> None:
        """Copies what was committed since the last call."""
        header = os.pread(self._log, _LOG_HEADER.size, 0)
        if len(header) < _LOG_HEADER.size:
            return
        size, salt = _LOG_HEADER.unpack(header)
        if salt != self._salt:  # the log has begun again
            self._salt = salt
            self._end = _LOG_HEADER.size
            self._frame = _frame_type(size)
        count = _READ_FRAMES
        while True:
            data = os.pread(self._log, count * self._frame.itemsize, self._end)
            frames = np.frombuffer(data, self._frame, len(data) // self._frame.itemsize)
            old = np.flatnonzero(frames["salt"] != np.void(salt))  # which the log has not overwritten yet
            frames = frames[: old[0]] if len(old) else frames
            commits = np.flatnonzero(frames["pages"])
            if len(commits):
                taken = frames[: commits[-1] + 1]
                self._take(taken["page"].astype(int), taken["content"], int(taken["pages"][-1]))
                self._end += taken.nbytes
            if len(frames) < count:
                return
            count *= 1 if len(commits) else 2

    def _take(self, numbers: np.ndarray, contents: np.ndarray, pages: int) -> None:
        """`numbers` of pages, from 1, and their contents, the newer behind; `pages`: how many there are."""
        size = contents.itemsize
        self._pages.extend(bytes(max(0, int(numbers.max()) * size - len(self._pages))))
        np.frombuffer(self._pages, contents.dtype)[numbers - 1] = contents
        del self._pages[pages * size :]

    def write(self, path: Path) -> None:
        """Writes the copy to the file at `path`, and syncs it."""
        path.write_bytes(self._pages)
        durable.seal(path)

    def close(self) -> None:
        os.close(self._log)
