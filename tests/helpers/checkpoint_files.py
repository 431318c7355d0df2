"""Checkpoints as the controller and the commands see them: whole by their list, with nothing to load."""

from pathlib import Path

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.files import durable
from laminar_hpc.store import checkpoints
from laminar_hpc.store.signatures import own_key


def write(run_dir: Path, step: int) -> Path:
    """That of step `step`; returns its folder."""
    path = checkpoints.checkpoint_path(run_dir, step)
    partial = path.with_name(f".{path.name}")
    (partial / "hf").mkdir(parents=True)
    durable.write(partial / "hf" / "model.safetensors", b"weights" * 99)
    files = {"hf/model.safetensors": durable.seal(partial / "hf" / "model.safetensors")}
    state = {"step": step, "state_hash": "", "skipped_in_a_row": 0, "distributed_optimizer": False}
    checkpoints.publish(partial, path, state, files, own_key(RunConfig(), run_dir).sign, lambda _: None)
    return path
