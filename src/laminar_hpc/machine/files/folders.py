"""Folders that belong to a process: it notes itself as their owner, and whoever comes later removes those
whose owner is dead."""

import fcntl
import os
import shutil
from pathlib import Path

from laminar_hpc.machine.files.shared_memory import remove_noted
from laminar_hpc.machine.locks.holder import is_held
from laminar_hpc.machine.processes import process_started, process_world

OWNER_FILE = "owner"
ENGINE_FOLDER_PREFIX = "laminar-engine-"  # in the folder for temporary files: an engine's sockets and files
SANDBOX_FOLDER_PREFIX = "laminar-sandbox-"  # beside those, a sandbox's
PAYLOADS_FOLDER_PREFIX = "laminar-payloads-"  # there too: responses that a rollout has not sent yet
SLOTS_PREFIX = "laminar-"  # in relay.shm_dir, where no engine's folder lies


def claim(folder: Path) -> None:
    """Notes this process as the folder's owner."""
    (folder / OWNER_FILE).write_text(_this_process())


def is_mine(folder: Path) -> bool:
    """Whether nobody has claimed the folder after this process."""
    try:
        return (folder / OWNER_FILE).read_text() == _this_process()
    except OSError:
        return False


def _this_process() -> str:
    return f"{os.getpid()} {process_started(os.getpid())} {process_world()}"


def abandoned(parent: Path, prefix: str) -> list[Path]:
    """The folders `parent`/`prefix`* whose owner is dead.

    Not among them: what belongs to another user, to a living process, or to one of another container or boot,
    what names no owner, and slots of which one is being loaded.
    """
    orphans = []
    for folder in parent.glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            pid, started, world = (folder / OWNER_FILE).read_text().split(maxsplit=2)
        except (OSError, ValueError):
            continue
        dead = world == process_world() and process_started(int(pid)) != started
        if dead and not any(is_held(lock, fcntl.flock) for lock in folder.glob("slot*/lock")):
            orphans.append(folder)
    return orphans


def remove(folder: Path) -> bool:
    """Removes a folder and the shared memory that its note names. Returns whether all of it is gone: segments
    that a process still has stay, and the folder with them, so that whoever looks next finds both."""
    if not remove_noted(folder):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def remove_abandoned(parent: Path, prefix: str) -> list[Path]:
    """Removes the abandoned folders; returns what was removed."""
    return [folder for folder in abandoned(parent, prefix) if remove(folder)]


def slots_root(shm_dir: str, run_id: str) -> Path:
    """Where a run keeps its weight slots: one folder per run and machine, so that two runs do not meet."""
    return Path(shm_dir) / f"{SLOTS_PREFIX}{run_id}"


def remove_dead_slots(shm_dir: str) -> list[Path]:
    """Removes the slot folders whose owner is dead; returns what was removed."""
    return remove_abandoned(Path(shm_dir), SLOTS_PREFIX)
