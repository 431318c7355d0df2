"""Who has made a file that says whose it is, and whether that process is alive: of locks (run_lock.py) and of
the signs of those who wait (line/waiting.py). A process that cannot be seen from here shows its life by
renewing the file's time."""

import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from laminar_hpc.machine.locks.lease import boot_time
from laminar_hpc.machine.processes import process_started, process_world, user_name

_FRESH_SHARE = 0.4  # of `stale_after`: who renewed within it counts as alive, whoever has not is watched
Watched = dict[str, tuple[float, float]]  # token -> the renewal seen last, and when first (boot_time)


class Owner(msgspec.Struct):
    """Who holds a lock. `started` and `world` make the PID name one process for good."""

    token: str
    user: str
    host: str
    pid: int
    started: str
    world: str
    since: float  # seconds since the epoch
    stale_after: float = 30.0  # seconds without a renewal

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"pid {self.pid} of {self.user} on {self.host}, since {since}"

    @staticmethod
    def this_process(stale_after: float) -> "Owner":
        """From now on."""
        pid, token = os.getpid(), secrets.token_hex(8)
        started, world = process_started(pid), process_world()
        return Owner(token, user_name(), socket.gethostname(), pid, started, world, time.time(), stale_after)

    @property
    def is_visible(self) -> bool:
        """Whether its process would be seen from here if it ran; of other users /proc may hide them."""
        is_here = self.host == socket.gethostname() and self.world == process_world()
        return is_here and self.user == user_name()


def is_alive(owner: Owner, renewed: float, now: float, watched: Watched) -> bool | None:
    """None while it cannot be told. `renewed` and `now` are the file system's times."""
    if owner.is_visible:
        return process_started(owner.pid) == owner.started
    first, since = watched.get(owner.token, (renewed, boot_time()))
    if renewed != first:
        watched[owner.token] = (renewed, boot_time())
        return True
    watched[owner.token] = (first, since)
    if boot_time() - since > owner.stale_after:  # whatever the clocks say
        return False
    return True if abs(now - renewed) < _FRESH_SHARE * owner.stale_after else None


def read_owner(path: Path) -> tuple[Owner, float] | None:
    """A lock's owner and when it was renewed, by the file system's clock. None if there is no lock.

    open() makes an NFS client ask the server, stat() alone may give what it remembers."""
    try:
        with open(path, "rb") as file:
            content, renewed = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=Owner), renewed
    except msgspec.DecodeError:  # being written (without hard links), or damaged: judged by its age
        token = f"unreadable-{renewed:.0f}"
        return Owner(token, "an unknown user", "an unknown host", 0, "", "", renewed), renewed
