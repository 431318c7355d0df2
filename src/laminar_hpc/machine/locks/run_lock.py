"""The lock of a folder: one live controller per run directory, also on NFS and Lustre.

`run.lock` says who holds it. The holder renews the file's time again and again, so that everybody can tell
from anywhere whether it is alive. Only link(), rename() and O_EXCL have to be atomic: advisory locks (flock,
fcntl) are off, local to a machine, or forgotten by the server on many clusters.

A lock is stale if its process is gone (same user, host, boot and PID namespace: told by PID and start time),
or, if the process cannot be seen from here, if we have seen its time unchanged for `Owner.stale_after`
seconds of our own clock. Whatever the file's time is: clocks that differ break no lock.

Holding it. The holder is sure of its lock for a part of that time after each renewal
(machine/locks/lease.py), and does what only the holder may do while it is sure (`RunLock.assure`). When it
could not renew in time it takes the lock again as a successor of itself, or finds that it has lost it. So
there are never two.

Taking over. The successor of the stale lock with token T is whoever creates `run.lock.T`: only one process
can. It replaces `run.lock` by its own, then removes `run.lock.T`. Whoever comes late finds `run.lock.T`, or
creates it again and sees that `run.lock` is no longer T's. A successor that dies half-way is succeeded in the
same way.
"""

import errno
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.machine.locks.lease import Lease
from laminar_hpc.machine.locks.lock_owner import Owner, Watched, is_alive, read_owner

log = logging.getLogger(__name__)
LOCK_FILE = "run.lock"
STALE_SECONDS = 8.0  # of the lock of a run: the time until a spare controller takes over
_RENEWALS = 8  # within the time after which a lock is stale
_LOOK_SECONDS = 0.25
_SURE_SECONDS = 0.05  # between two looks of one who waits to be sure
_CLOSE_SECONDS = 10.0  # for a renewal under way
_MOST_MOVES = 20
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LockLost(LaminarError):
    """Another process has the lock."""


class RunLock:
    """The locks of a run's folders, held by this process until `release`, unless another one takes them."""

    def __init__(
        self,
        folders: list[Path],
        say: Callable[[str], None],
        stale_after: float | None = None,
        watched: Watched | None = None,
    ) -> None:
        """Takes all of them or none. Raises Refused when a live process holds one, OSError when one cannot be
        written. Waits up to the holder's `stale_after` if it is unclear whether one on another machine is
        alive, less what was `watched` before. `stale_after`: of these locks."""
        self.lost = ""  # why they are no longer held, or not for long
        self.at_work: Callable[[], None] = lambda: None  # called while `assure` waits
        self._say = say
        self._held = dict[Path, _Held]()
        self._stale_after = stale_after or STALE_SECONDS
        self._watched: Watched = {} if watched is None else watched
        self._released = threading.Event()
        self._renewing = threading.Lock()
        try:
            for folder in folders:
                self._held[folder] = self._held.get(folder) or self._take(folder)
        except BaseException:
            self.release()
            raise
        threading.Thread(target=self._keep, name="run lock", daemon=True).start()
        self.assure()

    def _take(self, folder: Path) -> "_Held":
        lease = Lease(self._stale_after)
        owner = take(folder, self._say, self._stale_after, lease, self._watched)
        return _Held(folder, owner, lease)

    @property
    def is_sure(self) -> bool:
        """Whether all are certainly held at this moment."""
        return not self.lost and all(held.lease.is_sure for held in self._held.values())

    def assure(self) -> None:
        """Returns when they are certainly held, however slow the file system is. Raises LockLost."""
        while not self.is_sure and not self._released.is_set():
            if self.lost:
                raise LockLost(self.lost)
            self.at_work()
            time.sleep(_SURE_SECONDS)

    def give_up(self, why: str) -> None:
        """They are renewed no more, and others may take them. Returns at once."""
        self.lost = self.lost or why

    def moved(self, folder: Path, to: Path) -> None:
        """`folder` was renamed with its lock inside: releases that one and locks a new `folder`."""
        with self._renewing:
            _release(to, self._held.pop(folder).owner)
            self._held[folder] = self._take(folder)

    def release(self) -> None:
        self._released.set()
        done = self._renewing.acquire(timeout=_CLOSE_SECONDS)
        for folder, held in self._held.items():
            _release(folder, held.owner)
        self._held = {}
        if done:
            self._renewing.release()

    def _keep(self) -> None:
        while not self._released.wait(self._stale_after / _RENEWALS) and not self.lost:
            with self._renewing:
                for folder, held in () if self._released.is_set() else list(self._held.items()):
                    try:
                        self.lost = self.lost or held.renew() or self.lost
                    except OSError as error:  # a file server may be away for a while
                        log.warning("%s could not be renewed: %s", folder / LOCK_FILE, error)


class _Held:
    """One lock of this process."""

    def __init__(self, folder: Path, owner: Owner, lease: Lease) -> None:
        self.owner = owner
        self.lease = lease
        self._folder = folder
        self._watched = Watched()

    def renew(self) -> str:
        """Shows that the holder is alive. Returns why the lock is no longer held, or "".

        If somebody has removed the lock of a holder that is sure of it, it is made again."""
        begun, path = self.lease.begin(), self._folder / LOCK_FILE
        record, late = read_owner(path), self.lease.has_run_out
        if (record is None and late) or (record is not None and record[0].token != self.owner.token):
            by = f"taken by another run ({record[0]})" if record else "removed"
            return f"{path} was {by}: this one had shown no sign of life, or its lock was removed"
        if late:
            self._take_again(begun)
        elif record is not None:
            os.utime(path)
            self.lease.renewed(begun)
        else:
            with _claim(self._folder, self.owner) as claim:
                if _create(path, claim):
                    self.lease.renewed(begun)
        return ""

    def _take_again(self, begun: float) -> None:
        """As a successor of itself, of whom there can be only one. Not if another one is about to be that."""
        again = msgspec.structs.replace(self.owner, token=secrets.token_hex(8))
        with _claim(self._folder, again) as claim, suppress(Refused):
            now = claim.stat().st_mtime
            stale = _stale_owners(self._folder, now, self._watched, mine=self.owner.token)
            if stale and _succeed(self._folder, claim, stale):
                log.warning("%s was renewed late, and taken again", self._folder / LOCK_FILE)
                self.owner = again
                self.lease.taken(begun)


@contextmanager
def _claim(folder: Path, owner: Owner) -> Iterator[Path]:
    """A file of the owner's own that says who it is."""
    claim = folder / f".{LOCK_FILE}.{owner.token}"
    try:
        claim.write_bytes(msgspec.json.encode(owner))
        yield claim
    finally:
        claim.unlink(missing_ok=True)


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


def take(
    folder: Path, say: Callable[[str], None], stale_after: float, lease: Lease, watched: Watched
) -> Owner:
    """Takes the lock of `folder`, which is made if need be. Raises as RunLock does."""
    mine = Owner.this_process(stale_after)
    told, moves = False, 0
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _claim(folder, mine) as claim:
                begun = lease.begin()
                stale = _stale_owners(folder, claim.stat().st_mtime, watched)
                if stale is not None and _succeed(folder, claim, stale):
                    lease.taken(begun)
                    for owner in stale:
                        say(f"the lock of a process that is gone was taken over ({owner})")
                    return mine
        except FileNotFoundError:  # another start has just moved the folder away: once more, in a new one
            moves += 1
            if moves > _MOST_MOVES:
                raise
            continue
        if stale is None:
            if not told:
                say(f"{folder / LOCK_FILE} was not renewed lately: watching it for a while")
            told = True
            time.sleep(_LOOK_SECONDS)


def _stale_owners(folder: Path, now: float, watched: Watched, mine: str = "") -> list[Owner] | None:
    """The owners whom we may succeed, oldest first: empty if the folder is free. None while that is unclear.

    `now` is the file system's time; `mine`: the token of a lock that is our own. Raises Refused when the
    holder is alive."""
    stale: list[Owner] = []
    place = folder / LOCK_FILE
    while (record := read_owner(place)) is not None:
        owner, renewed = record
        alive = owner.token != mine and is_alive(owner, renewed, now, watched)
        if alive is None:
            return None
        if alive:
            raise Refused([_refusal(folder, owner, now - renewed)])
        stale.append(owner)
        place = folder / f"{LOCK_FILE}.{owner.token}"
    return stale


def _refusal(folder: Path, owner: Owner, age: float) -> str:
    text = (
        f"{folder} is in use by a live run ({owner}), which is left alone: choose another run_dir, or end "
        f"that run first (laminar stop {folder})"
    )
    if owner.is_visible:
        return text
    return (
        f"{text}; its last sign of life came {max(0.0, age):.0f} s ago: if you know that it is gone, start "
        f"again {owner.stale_after:.0f} s after its end, or remove {folder / LOCK_FILE}"
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
