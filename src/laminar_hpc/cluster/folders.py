"""Folders that belong to a process: it notes itself as their owner, and whoever comes later removes those whose owner is dead."""

import os
import shutil
from pathlib import Path

from laminar_hpc.cluster.processes import process_started, process_world

OWNER_FILE = "owner"
ENGINE_FOLDER_PREFIX = "laminar-engine-"  # in the folder for temporary files: an engine's sockets and files


def claim(folder: Path) -> None:
    """Notes this process as the folder's owner."""
    (folder / OWNER_FILE).write_text(f"{os.getpid()} {process_started(os.getpid())} {process_world()}")


def remove_abandoned(parent: Path, prefix: str) -> list[Path]:
    """Removes the folders `parent`/`prefix`* whose owner is dead; returns what was removed.

    Left alone: what belongs to another user, to a living process, or to one of another container or boot, and what names no owner.
    """
    removed = []
    for folder in parent.glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            pid, started, world = (folder / OWNER_FILE).read_text().split(maxsplit=2)
        except (OSError, ValueError):
            continue
        if world == process_world() and process_started(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed
