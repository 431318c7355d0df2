"""What waits to be sent: a queue of frames, in memory up to some MiB, behind that in anonymous temporary
files that are gone with the process."""

import tempfile
from collections import deque
from typing import IO

from laminar_hpc.config.errors import LaminarError

MEMORY_BYTES = 16 << 20
LIMIT_BYTES = 4 << 30
_SEGMENT_BYTES = 64 << 20  # a file that was read is closed, which gives its space back
_LENGTH = 8


class SpoolFull(LaminarError):
    """More waits than is allowed: the other side has taken nothing for too long."""


class Spool:
    """First in, first out. Not thread-safe."""

    def __init__(self, memory: int = MEMORY_BYTES, limit: int = LIMIT_BYTES) -> None:
        self._memory = memory
        self._limit = limit
        self._head: deque[bytes] = deque()  # the oldest frames
        self._head_bytes = 0
        self._files: deque[_Segment] = deque()  # all newer ones
        self._file_bytes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def on_disk(self) -> bool:
        return bool(self._files)

    def append(self, frame: bytes) -> None:
        """Raises SpoolFull, or OSError where the disk is full."""
        size = len(frame)
        if not self._files and self._head_bytes + size <= self._memory:
            self._head.append(frame)
            self._head_bytes += size
        else:
            if self._file_bytes + size > self._limit:
                raise SpoolFull(
                    f"{self._count} messages of {(self._head_bytes + self._file_bytes) / 1e9:.1f} GB wait to "
                    "be sent and the other side takes none; is it overloaded, or cut off from this machine?"
                )
            if not self._files or self._files[-1].written >= _SEGMENT_BYTES:
                self._files.append(_Segment())
            self._files[-1].write(frame)
            self._file_bytes += size
        self._count += 1

    def popleft(self) -> bytes:
        if self._head:
            frame = self._head.popleft()
            self._head_bytes -= len(frame)
        else:
            segment = self._files[0]
            frame = segment.read()
            self._file_bytes -= len(frame)
            if segment.is_read:
                self._files.popleft().close()
        self._count -= 1
        return frame

    def close(self) -> None:
        for segment in self._files:
            segment.close()
        self._files.clear()
        self._head.clear()
        self._head_bytes = self._file_bytes = self._count = 0


class _Segment:
    """One file: frames behind their lengths."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="laminar-spool-")  # noqa: SIM115
        self._position = self.written = 0

    @property
    def is_read(self) -> bool:
        return self._position == self.written

    def write(self, frame: bytes) -> None:
        self._file.seek(self.written)
        self._file.write(len(frame).to_bytes(_LENGTH))
        self._file.write(frame)
        self._file.flush()
        self.written += _LENGTH + len(frame)

    def read(self) -> bytes:
        self._file.seek(self._position)
        size = int.from_bytes(self._file.read(_LENGTH))
        frame = self._file.read(size)
        self._position += _LENGTH + size
        return frame

    def close(self) -> None:
        self._file.close()
