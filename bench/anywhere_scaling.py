"""Figures of bench/anywhere.py on rollouts that follow the trainer.

`autoscaled_over_best` (goal: at least 0.9): tokens per second of an emulated run with rollout.replicas=2:6,
which begins with two, over those of the best fixed number of replicas, the smallest that makes 97% of
what any makes; `replica_seconds_over_best` (goal: at most 1.15): its replica-seconds per token over that;
`gain_error` (goal: at most 0.15): the largest error of a predicted gain, as throughput. Real controller,
workers and messages, a process for each replica. Replica-seconds count from the start of a process.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from scaled_fleet import FEWEST, MOST, scaled_run

Row = dict[str, object]
STEPS, STEPS_FIXED = 120, 40
GOOD = 0.97


def autoscaled_over_best(_: argparse.Namespace) -> tuple[dict[str, float], list[Row]]:
    """See the top of this file: the figures, and all runs."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        return _figures(Path(folder))


def _figures(folder: Path) -> tuple[dict[str, float], list[Row]]:
    numbers: list[int | str] = [FEWEST, FEWEST + 1, f"{FEWEST}:{MOST}", FEWEST + 2, MOST]
    rows: list[dict[str, Any]] = [
        scaled_run(folder / f"n{n}", n, STEPS_FIXED if isinstance(n, int) else STEPS) for n in numbers
    ]
    fixed = [row for row in rows if ":" not in row["replicas"]]
    scaled = next(row for row in rows if row not in fixed)
    most = max(row["tokens_per_second"] for row in fixed)
    best = next(row for row in fixed if row["tokens_per_second"] >= GOOD * most)

    def seconds_per_token(row: dict[str, Any]) -> float:
        return row["mean_replicas"] / row["tokens_per_second"]

    errors = [
        abs((1.0 + each["predicted_gain"]) / (1.0 + each["measured_gain"]) - 1.0)
        for each in scaled["changes"]
    ]
    figures = {
        "autoscaled_over_best": scaled["tokens_per_second"] / best["tokens_per_second"],
        "replica_seconds_over_best": seconds_per_token(scaled) / seconds_per_token(best),
        "gain_error": max(errors, default=1.0),
    }
    return figures, rows
