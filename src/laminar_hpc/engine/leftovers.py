"""What killed runs have left on this machine: weight slots, files and shared memory of engines, sandboxes'
folders, KV caches on the move.

Every start of a relay or an engine removes it; `laminar doctor` lists it, and removes it with --clean. Only
what provably belonged to dead processes of this user, container and boot counts (machine/files/folders.py,
machine/files/shared_memory.py, engine/kv/offers.py).
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.engine.kv import offers
from laminar_hpc.machine.files import folders, shared_memory


@dataclass(frozen=True)
class Leftover:
    """`size` in bytes of memory or disk that removing it frees."""

    what: str
    path: Path
    size: int


def find(shm: Path | None = None, temporary: Path | None = None) -> list[Leftover]:
    """Under `shm` (default: /dev/shm) and the folder for temporary files."""
    shm, temporary = shm or shared_memory.SHM, temporary or Path(tempfile.gettempdir())
    slots = [("weight slots", path) for path in folders.abandoned(shm, folders.SLOTS_PREFIX)]
    engines = [("engine files", path) for path in folders.abandoned(temporary, folders.ENGINE_FOLDER_PREFIX)]
    boxes = [("sandbox files", path) for path in folders.abandoned(temporary, folders.SANDBOX_FOLDER_PREFIX)]
    payloads = [
        ("unsent responses", path) for path in folders.abandoned(temporary, folders.PAYLOADS_FOLDER_PREFIX)
    ]
    moves = [("KV caches", path) for path in offers.abandoned(shm)]
    return [Leftover(what, path, _size(path)) for what, path in (*slots, *engines, *boxes, *payloads, *moves)]


def clean(shm: Path | None = None, temporary: Path | None = None) -> list[Leftover]:
    """Removes what `find` finds; returns what is gone, with its sizes."""
    gone = []
    for leftover in find(shm, temporary):
        if leftover.path.is_dir():
            if folders.remove(leftover.path):
                gone.append(leftover)
        else:
            leftover.path.unlink(missing_ok=True)
            gone.append(leftover)
    return gone


def _size(path: Path) -> int:
    inside = (
        [Path(root, name) for root, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    )
    return sum(_allocated(file) for file in (*inside, *shared_memory.noted(path)))


def _allocated(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:
        return 0
