"""Where a run keeps its slots, and which slot folders of dead runs are left over. Imports no torch."""

from pathlib import Path

from laminar_hpc.cluster.folders import remove_abandoned


def slots_root(shm_dir: str, run_id: str) -> Path:
    """One folder per run and machine, so that two runs on one machine do not meet."""
    return Path(shm_dir) / f"laminar-{run_id}"


def clean_leftovers(shm_dir: str) -> list[Path]:
    """Removes the slot folders whose owner is dead; returns what was removed."""
    return remove_abandoned(Path(shm_dir), "laminar-")
