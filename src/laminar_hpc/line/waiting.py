"""Signs of those who wait: files that they renew, so that their life is seen from any machine. Roles that
have lost their controller and wait for the next one show theirs in `run_dir/waiting/`, for whoever starts or
stops a run without a live controller; spare controllers in `run_dir/jobs/` (launch/slurm/spare.py).

Trainers whose job waits in Slurm's queue can show none: the script of the controller's job does
(slurm/common.sh), by a file that it writes again and again (`are_queued`).

A sign is judged as the lock of a run is (machine/locks/lock_owner.py): by its process on this machine,
elsewhere by its renewal.
"""

import logging
import os
import time
from pathlib import Path

import msgspec

from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.machine.locks.lock_owner import Owner, Watched, is_alive, read_owner

log = logging.getLogger(__name__)
_RENEW_SECONDS = 2.0
_STALE_SECONDS = 16.0
_LOOK_SECONDS = 0.25
# after the death of a controller each of its roles shows its sign: it looks once a second, and on another
# machine after 3 s of silence
SHOW_SECONDS = 6.0
_FOLDER = "waiting"
_QUEUED = Path("jobs") / "queued.trainer"


def sign_of(run_dir: Path, hello: Hello) -> "Sign":
    """Of a role that has lost its controller; used by the thread that watches it."""
    return Sign(run_dir / _FOLDER / f"{hello.role}_{hello.index}.{hello.incarnation}")


class Sign:
    """The sign of one who waits, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown_at: float | None = None  # by the clock of `show`
        self._owner: Owner | None = None

    def show(self, now: float) -> None:
        """Makes it, or renews it from time to time."""
        if self._shown_at is not None and now - self._shown_at < _RENEW_SECONDS:
            return
        self._shown_at = now
        self._owner = self._owner or Owner.this_process(_STALE_SECONDS)
        try:
            try:
                os.utime(self._path)
            except FileNotFoundError:
                self._make(self._owner)
        except OSError as error:
            log.warning("%s could not be written: %s", self._path, error)

    def _make(self, owner: Owner) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_whole(self._path, msgspec.json.encode(owner))

    def take_away(self) -> None:
        """The wait is over."""
        if self._shown_at is not None:
            self._shown_at = self._owner = None
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s could not be removed: %s", self._path, error)


def are_queued(run_dir: Path) -> bool:
    """Whether Slurm was seen to have the trainers' job in its queue since this was last asked."""
    try:
        (run_dir / _QUEUED).unlink()
    except FileNotFoundError:
        return False
    return True


def who_waits(run_dir: Path, seconds: float = 0.0) -> list[str]:
    """The live roles that wait there, as "relay 0 (pid 7 of ...)"; those that show their sign within
    `seconds`, if none does yet. Takes longer where it is unclear whether one on another machine lives."""
    return shown_in(run_dir / _FOLDER, "[a-z]*_*.*", seconds)


def shown_in(folder: Path, pattern: str, seconds: float = 0.0) -> list[str]:
    """The same of the signs in `folder` whose names match `pattern`."""
    watched, until = Watched(), time.monotonic() + seconds
    while True:
        judged = {path.name: _judge(path, folder, watched) for path in sorted(folder.glob(pattern))}
        waiting = [text for text in judged.values() if text]
        if waiting or (None not in judged.values() and time.monotonic() >= until):
            return waiting
        time.sleep(_LOOK_SECONDS)


def _judge(path: Path, folder: Path, watched: Watched) -> str | None:
    """Who it is, if alive; "" for a sign left behind, which is removed; None while that is unclear."""
    found = read_owner(path)
    if found is None:
        return ""
    owner, renewed = found
    probe = folder / f".{path.name}.seen"
    probe.touch()
    try:
        alive = is_alive(owner, renewed, probe.stat().st_mtime, watched)
    finally:
        probe.unlink(missing_ok=True)
    if alive:
        return f"{path.stem.replace('_', ' ').replace('.', ' ')} ({owner})"
    if alive is None:
        return None
    path.unlink(missing_ok=True)
    return ""
