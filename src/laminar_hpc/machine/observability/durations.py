"""How long the steps and checkpoints of a run took, from its metrics: also those of earlier lives."""

from pathlib import Path
from typing import NamedTuple

from laminar_hpc.machine.files import jsonl


class Durations(NamedTuple):
    """In seconds, the newest last. `steps`: without the first of each life, which starts the engines."""

    steps: list[float]
    saves: list[float]


def read_durations(run_dir: Path) -> Durations:
    """The durations so far; empty before anything was measured."""
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
    return Durations(steps, saves)
