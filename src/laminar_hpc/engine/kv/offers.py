"""The files through which KV caches move (shm.py), as files: their names, the lock of each side, and which of
them are abandoned.

Imports no torch.
"""

import contextlib
import fcntl
import os
import stat
import struct
import time
from pathlib import Path

PREFIX = "laminar-kv-"
_YOUNG_SECONDS = 60.0  # a file this young may not have its source's lock yet
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def hold(fd: int, byte: int) -> None:
    """Locks a byte of the file for this process's life (an open file description's lock: a thread's other
    opening counts as another)."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))


def held(fd: int, byte: int) -> bool:
    """Whether another opening of the file has this byte locked."""
    lock = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return _LOCK.unpack(lock)[0] != fcntl.F_UNLCK


def abandoned(folder: Path) -> list[Path]:
    """The offers of this user whose source was killed before anyone took them."""
    paths = []
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one removes it, or it is another user's
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(fd)
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if ours and time.time() - status.st_mtime > _YOUNG_SECONDS and not held(fd, 0):
                    paths.append(path)
            finally:
                os.close(fd)
    return paths


def remove_abandoned(folder: Path) -> list[Path]:
    """Removes the abandoned offers; returns what was removed."""
    removed = abandoned(folder)
    for path in removed:
        path.unlink(missing_ok=True)
    return removed
