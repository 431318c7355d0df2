"""A file that one process of this machine holds at a time; the kernel lets go of it when the process ends."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_SECONDS = 0.05


class HeldByAnother(Exception):
    """A living process holds it."""

    def __init__(self, pid: str) -> None:
        super().__init__(f"pid {pid}")


def hold(path: Path, seconds: float) -> int:
    """Returns a descriptor that holds the file, whose folder is made, until it is closed; its process may
    have several. Waits for a holder that is about to end. Raises HeldByAnother after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        except OSError:  # EACCES or EAGAIN
            if time.monotonic() > until:
                pid = os.pread(descriptor, 20, 0).decode()
                os.close(descriptor)
                raise HeldByAnother(pid) from None
        os.close(descriptor)  # it is held, or its folder was removed by the last holder
        time.sleep(_LOOK_SECONDS)


def is_held(path: Path, lock: Callable[[int, int], object] = fcntl.lockf) -> bool:
    """Another living process holds it, by `lock`: fcntl.lockf as `hold` does, or fcntl.flock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # EACCES or EAGAIN
        return True
    finally:
        os.close(descriptor)
    return False
