"""How long the steps and checkpoints of a run took, from its metrics: also those of earlier lives."""

from pathlib import Path

from laminar_hpc.machine.files import jsonl


def read_durations(run_dir: Path) -> tuple[list[float], list[float]]:
    """Seconds of the steps, without the first of each life, which starts the engines, and of the checkpoints;
    the newest last."""
    steps, saves, is_first = list[float](), list[float](), True
    for record in jsonl.read(run_dir / "metrics.jsonl", "start", "step", "checkpoint"):
        seconds = record.get("seconds")
        if record["kind"] == "start":
            is_first = True
        elif isinstance(seconds, int | float):
            if record["kind"] == "checkpoint":
                saves.append(float(seconds))
            elif not is_first:
                steps.append(float(seconds))
            is_first = is_first and record["kind"] == "checkpoint"
    return steps, saves
