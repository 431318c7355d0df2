"""A run's store for whoever only reads it, on any machine that sees the run directory: `laminar report` and
`laminar audit`. Changes nothing."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.store import journal_files as files
from laminar_hpc.store.journal import FOLDER
from laminar_hpc.store.rebuild import build
from laminar_hpc.store.recovery import identity, journal_id

_STORE = "store.sqlite"


@dataclass(frozen=True)
class ReadableStore:
    """`path` need not exist. Where it is a copy, it lasts as long as this object."""

    path: Path
    copy: tempfile.TemporaryDirectory | None = None


def readable_store(run_dir: Path, store_dir: str | None) -> ReadableStore:
    """The store where the run has it; with `store_dir`, where that is not on this machine or others have gone
    on from it elsewhere, a copy in TMPDIR made from the journal in `run_dir`. Raises Refused when the journal
    is damaged."""
    path = (Path(store_dir) / run_dir.resolve().name if store_dir else run_dir) / _STORE
    journal = run_dir / FOLDER
    found = identity(path) if store_dir else None
    if found and found.position and found.position.era >= files.newest_era(journal):
        return ReadableStore(path)
    if not store_dir or not journal_id(journal):
        return ReadableStore(path)
    copy = tempfile.TemporaryDirectory(prefix="laminar-store-")
    target = Path(copy.name) / _STORE
    while True:
        newest = files.snapshots(journal)[-1:]
        try:
            build(journal, target)
            return ReadableStore(target, copy)
        except (LaminarError, OSError):  # a live run has taken a snapshot, and removed what came before it
            if files.snapshots(journal)[-1:] == newest:
                raise
