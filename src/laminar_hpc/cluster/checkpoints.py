"""Where checkpoints lie and which one is the newest: run_dir/checkpoints/step_000020/{hf/, megatron/,
state.json}.

Used by the trainer, which writes them, and by the controller, which resumes from them; imports no torch. A
checkpoint is written under a name that begins with a dot and renamed when it is whole, so every step_* folder
is complete.
"""

import json
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step_(\d{6,})")
STATE_FILE = "state.json"


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`, whether it exists or not."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def steps(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    folder = Path(run_dir) / "checkpoints"
    names = [p.name for p in folder.iterdir() if (p / STATE_FILE).is_file()] if folder.is_dir() else []
    return sorted(int(m[1]) for m in map(_NAME.fullmatch, names) if m)


def read_state(checkpoint: Path) -> dict:
    """state.json: step, state_hash, data_parallel, distributed_optimizer, skipped_in_a_row."""
    return json.loads((checkpoint / STATE_FILE).read_text())


def prune(run_dir: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints, and whatever an interrupted writer has left. Renamed
    first, so none is seen half-deleted."""
    folder = Path(run_dir) / "checkpoints"
    for step in steps(run_dir)[:-keep]:
        doomed = checkpoint_path(run_dir, step)
        doomed.rename(folder / f".old_{doomed.name}")
    for leftover in folder.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)
