"""Where a run keeps its slots, and which slot folders of dead runs are left over. Imports no torch."""

import os
import shutil
from pathlib import Path

from laminar_hpc.cluster.processes import process_started

OWNER_FILE = "owner"


def slots_root(shm_dir: str, run_id: str) -> Path:
    """One folder per run and machine, so that two runs on one machine do not meet."""
    return Path(shm_dir) / f"laminar-{run_id}"


def claim(root: Path) -> None:
    """Notes this process as the folder's owner."""
    (root / OWNER_FILE).write_text(f"{os.getpid()} {process_started(os.getpid())}")


def clean_leftovers(shm_dir: str) -> list[Path]:
    """Removes the slot folders whose owner is dead; returns what was removed. Folders of other users or living runs are not touched."""
    removed = []
    for root in Path(shm_dir).glob("laminar-*"):
        try:
            if root.stat().st_uid != os.getuid():
                continue
            pid, started = (root / OWNER_FILE).read_text().split()
        except (FileNotFoundError, ValueError):
            continue
        if process_started(int(pid)) != started:
            shutil.rmtree(root, ignore_errors=True)
            removed.append(root)
    return removed
