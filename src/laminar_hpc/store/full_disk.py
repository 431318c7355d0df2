"""A disk without room: recognised whatever a library made of it, and said with place and cure."""

import errno
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.observability.console import size
from laminar_hpc.store.checkpoints import steps

_WORDS = ("No space left on device", "Disk quota exceeded", "database or disk is full")
_HINTS = ("write", "iostream")  # of libraries that do not tell why: believed if a disk is full
_NO_ROOM_BYTES = 1 << 20
ROOM_LOOK_SECONDS = 2.0
NO_ROOM = "no room on the disk of"


def is_full_disk(error: BaseException) -> bool:
    """Whether it came, however indirectly, from a disk without room."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(cause) for words in _WORDS):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False


def full_disk_text(error: BaseException, config: RunConfig) -> str:
    """One line: which disk is full, how to go on, and what is safe. "" if the error is of another kind."""
    places = {
        f"run_dir={config.run_dir}": Path(config.run_dir),
        f"store_dir={config.store_dir}": Path(config.store_dir or config.run_dir),
        f"relay.shm_dir={config.relay.shm_dir}": Path(config.relay.shm_dir),
        f"the folder for temporary files, {tempfile.gettempdir()}": Path(tempfile.gettempdir()),
    }
    room = {name: free for name, path in places.items() if (free := _room(path)) is not None}
    full = [name for name in room if room[name] < _NO_ROOM_BYTES]
    hinted = bool(full) and any(hint in str(error) for hint in _HINTS)
    if not hinted and not is_full_disk(error):
        return ""
    place = full[0] if full else getattr(error, "filename", None) or next(iter(places))
    left = f" ({size(room[place])} left)" if place in room else ""
    saved = steps(Path(config.run_dir))
    safe = f"the checkpoint of step {saved[-1]}" if saved else "step 0, as there is no checkpoint yet"
    return (
        f"{NO_ROOM} {place}{left}: make room, then go on with the same command and resume=auto, "
        f"which begins at {safe}"
    )


def has_room(config: RunConfig) -> bool:
    """Whether run_dir and store_dir have room again, as far as one can see: a quota cannot be looked at."""
    rooms = [_room(Path(path)) for path in (config.run_dir, config.store_dir or config.run_dir)]
    return all(free is None or free >= _NO_ROOM_BYTES for free in rooms)


def put(file: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Makes an empty file, as soon as the disk has room for it."""
    while True:
        try:
            return file.touch()
        except OSError as error:
            if not is_full_disk(error):
                raise
        sleep(ROOM_LOOK_SECONDS)


def _room(path: Path) -> int | None:
    """Bytes that this user may still write there; 0 without inodes; None where there is no such folder."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return 0 if status.f_files and not status.f_favail else status.f_bavail * status.f_frsize
