"""The lock of a folder: one live controller per run directory, also on NFS and Lustre.

`run.lock` says who holds it. The holder renews the file's time every few seconds, so that everybody can tell
from anywhere whether it is alive. Only link(), rename() and O_EXCL have to be atomic: advisory locks (flock,
fcntl) are off, local to a machine, or forgotten by the server on many clusters.

A lock is stale if its process is gone (same host, boot and PID namespace: told by PID and start time), or, if
the process cannot be seen from here, if the file was not renewed for STALE_SECONDS by the file system's own
clock and is not renewed while we watch it.

Taking over. The successor of the stale lock with token T is whoever creates `run.lock.T`: only one process
can. It replaces `run.lock` by its own, then removes `run.lock.T`. Whoever comes late finds `run.lock.T`, or
creates it again and sees that `run.lock` is no longer T's. A successor that dies half-way is succeeded in the
same way.
"""

import errno
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from laminar_hpc.cluster.processes import process_started, process_world, user_name
from laminar_hpc.config.errors import Refused

log = logging.getLogger(__name__)
LOCK_FILE = "run.lock"
RENEW_SECONDS = 5.0
FRESH_SECONDS = 12.0  # a lock renewed within this is held; an older one is watched
STALE_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_MOST_MOVES = 20
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
Watched = dict[str, tuple[float, float]]  # token -> the renewal first seen, and when that was (monotonic)


class Owner(msgspec.Struct):
    """Who holds a lock. `started` and `world` make the PID name one process for good."""

    token: str
    user: str
    host: str
    pid: int
    started: str
    world: str
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"pid {self.pid} of {self.user} on {self.host}, since {since}"

    @staticmethod
    def this_process() -> "Owner":
        """From now on."""
        pid, token = os.getpid(), secrets.token_hex(8)
        started, world = process_started(pid), process_world()
        return Owner(token, user_name(), socket.gethostname(), pid, started, world, time.time())

    @property
    def is_visible(self) -> bool:
        """Whether its process would be seen from here if it ran."""
        return self.host == socket.gethostname() and self.world == process_world()


class RunLock:
    """The locks of a run's folders, held by this process until `release`. `lost` says why they no longer
    are."""

    def __init__(self, folders: list[Path], say: Callable[[str], None]) -> None:
        """Takes all of them or none. Raises Refused when a live process holds one, OSError when one cannot be
        written. Waits up to STALE_SECONDS if it is unclear whether a holder on another machine is alive."""
        self.lost = ""
        self._say, self._owners, self._released = say, dict[Path, Owner](), threading.Event()
        try:
            for folder in folders:
                self._owners[folder] = self._owners.get(folder) or _take(folder, say)
        except BaseException:
            self.release()
            raise
        threading.Thread(target=self._keep, name="run lock", daemon=True).start()

    def moved(self, folder: Path, to: Path) -> None:
        """`folder` was renamed with its lock inside: releases that one and takes the lock of a new
        `folder`."""
        _release(to, self._owners.pop(folder))
        self._owners[folder] = _take(folder, self._say)

    def release(self) -> None:
        self._released.set()
        for folder, owner in self._owners.items():
            _release(folder, owner)
        self._owners = {}

    def _keep(self) -> None:
        while not self._released.wait(RENEW_SECONDS) and not self.lost:
            for folder, owner in list(self._owners.items()):
                try:
                    self.lost = self.lost or _renew(folder, owner)
                except OSError as error:  # a file server may be away for a while
                    log.warning("%s could not be renewed: %s", folder / LOCK_FILE, error)


def refuse_if_held(folder: Path, watched: Watched | None = None) -> bool:
    """Raises Refused when a live process holds the lock of `folder`. Takes nothing and does not wait. Whether
    it could be taken now; False while that is unclear. `watched`: what earlier calls have seen, to be told
    in the end."""
    if not (folder / LOCK_FILE).exists():
        return True
    now = folder / f".{LOCK_FILE}.{secrets.token_hex(8)}"
    with suppress(OSError):  # not ours to write: whoever takes the lock will say so
        now.touch()
        try:
            return _stale_owners(folder, now.stat().st_mtime, {} if watched is None else watched) is not None
        finally:
            now.unlink(missing_ok=True)
    return True


def _take(folder: Path, say: Callable[[str], None]) -> Owner:
    """Takes the lock of `folder`, which is made if need be. Raises as RunLock does."""
    mine = Owner.this_process()
    claim = folder / f".{LOCK_FILE}.{mine.token}"
    watched: Watched = {}
    told, moves = False, 0
    try:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                claim.write_bytes(msgspec.json.encode(mine))
                stale = _stale_owners(folder, claim.stat().st_mtime, watched)
                if stale is None:
                    if not told:
                        lock = folder / LOCK_FILE
                        say(f"{lock} was not renewed lately: watching it for {STALE_SECONDS:.0f} s at most")
                    told = True
                    time.sleep(_LOOK_SECONDS)
                elif _succeed(folder, claim, stale):
                    for owner in stale:
                        say(f"the lock of a process that is gone was taken over ({owner})")
                    return mine
            except FileNotFoundError:  # another start has just moved the folder away: once more, in a new one
                moves += 1
                if moves > _MOST_MOVES:
                    raise
    finally:
        claim.unlink(missing_ok=True)


def _stale_owners(folder: Path, now: float, watched: Watched) -> list[Owner] | None:
    """The owners whom we may succeed, oldest first: empty if the folder is free. None while that is unclear.

    `now` is the file system's time. Raises Refused when the holder is alive."""
    stale: list[Owner] = []
    place = folder / LOCK_FILE
    while (record := read_owner(place)) is not None:
        owner, renewed = record
        alive = is_alive(owner, renewed, now, watched)
        if alive is None:
            return None
        if alive:
            raise Refused([_refusal(folder, owner, now - renewed)])
        stale.append(owner)
        place = folder / f"{LOCK_FILE}.{owner.token}"
    return stale


def is_alive(owner: Owner, renewed: float, now: float, watched: Watched) -> bool | None:
    """None while it cannot be told. `renewed` and `now` are the file system's times."""
    if owner.is_visible:
        return process_started(owner.pid) == owner.started
    first, since = watched.setdefault(owner.token, (renewed, time.monotonic()))
    if now - renewed < FRESH_SECONDS or renewed != first:
        return True
    unchanged = time.monotonic() - since  # a clock that is off cannot make a live holder look stale
    return False if now - renewed > STALE_SECONDS and unchanged > 2 * RENEW_SECONDS else None


def _refusal(folder: Path, owner: Owner, age: float) -> str:
    text = (
        f"{folder} is in use by a live run ({owner}), which is left alone: choose another run_dir, or end "
        f"that run first (laminar stop {folder})"
    )
    if owner.is_visible:
        return text
    return (
        f"{text}; its last sign of life came {max(0.0, age):.0f} s ago: if you know that it is gone, start "
        f"again {STALE_SECONDS:.0f} s after its end, or remove {folder / LOCK_FILE}"
    )


def _succeed(folder: Path, claim: Path, stale: list[Owner]) -> bool:
    """Makes the lock ours; False when another process was faster."""
    place = folder / (f"{LOCK_FILE}.{stale[-1].token}" if stale else LOCK_FILE)
    if not _create(place, claim):
        return False
    if not stale:
        return True
    first = read_owner(folder / LOCK_FILE)
    if first is None or first[0].token != stale[0].token:  # a faster one has come and has already tidied up
        place.unlink(missing_ok=True)
        return False
    claim.replace(folder / LOCK_FILE)
    for owner in stale:
        (folder / f"{LOCK_FILE}.{owner.token}").unlink(missing_ok=True)
    return True


def _create(place: Path, claim: Path) -> bool:
    """Creates `place` with the content of `claim`; False when it exists."""
    try:
        os.link(claim, place)
        return True
    except FileExistsError:
        return place.exists() and place.samefile(claim)  # NFS: it was made, and the server's answer was lost
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
    try:
        with open(place, "xb") as file:
            file.write(claim.read_bytes())
    except FileExistsError:
        return False
    return True


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


def _renew(folder: Path, owner: Owner) -> str:
    """Shows that the holder is alive. Returns why the lock is no longer held, or "".

    If somebody has removed the lock of this live holder, it is made again."""
    path = folder / LOCK_FILE
    record = read_owner(path)
    if record is not None and record[0].token != owner.token:
        why = "this one had shown no sign of life, or its lock was removed"
        return f"{path} was taken by another run ({record[0]}): {why}"
    if record is not None:
        os.utime(path)
        return ""
    claim = folder / f".{LOCK_FILE}.{owner.token}"
    try:
        claim.write_bytes(msgspec.json.encode(owner))
        _create(path, claim)
    finally:
        claim.unlink(missing_ok=True)
    return ""


def _release(folder: Path, owner: Owner) -> None:
    path = folder / LOCK_FILE
    try:
        record = read_owner(path)
        if record is not None and record[0].token == owner.token:
            path.unlink()
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


if __name__ == "__main__":  # of launch/all_roles.sh: RUN_DIR
    try:
        refuse_if_held(Path(sys.argv[1]))
    except Refused as refused:
        print(f"laminar: error: {refused}", file=sys.stderr)
        sys.exit(2)
