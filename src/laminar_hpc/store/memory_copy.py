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

from laminar_hpc.machine.files import durable

_LOG_HEADER = struct.Struct(">8xI4x8s8x")  # page size, salt
_FRAME_HEADER = struct.Struct(">II8s8x")  # page, size of the database in pages if a commit ends here, salt
_READ_BYTES = 1 << 20


class MemoryCopy:
    """Follows the store at `path`. Only `db` writes to it, and has no open transaction yet."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # opens the log
        self._log = os.open(path.with_name(f"{path.name}-wal"), os.O_RDONLY)
        self._salt = b""
        self._end = _LOG_HEADER.size
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
        at, found, data = 0, list[tuple[int, int]](), b""
        while True:
            if at + _FRAME_HEADER.size + size > len(data):
                data += os.pread(self._log, _READ_BYTES, self._end + len(data))
                if at + _FRAME_HEADER.size + size > len(data):
                    return
            page, pages, salt = _FRAME_HEADER.unpack_from(data, at)
            if salt != self._salt:  # an old frame, which the log has not overwritten yet
                return
            at += _FRAME_HEADER.size
            found.append((page, at))
            at += size
            if pages:
                self._take(found, data, size, pages)
                self._end = self._end + at
                found = []
                data = data[at:]
                at = 0

    def _take(self, found: list[tuple[int, int]], data: bytes, size: int, pages: int) -> None:
        """`found`: pages of `size` bytes, and where they are in `data`; `pages`: how many there are now."""
        self._pages.extend(bytes(max(0, pages * size - len(self._pages))))
        view = memoryview(data)
        for page, at in found:
            self._pages[(page - 1) * size : page * size] = view[at : at + size]
        del self._pages[pages * size :]

    def write(self, path: Path) -> None:
        """Writes the copy to the file at `path`, and syncs it."""
        path.write_bytes(self._pages)
        durable.seal(path)

    def close(self) -> None:
        os.close(self._log)
