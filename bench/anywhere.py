"""Rollouts that follow the trainer.

    python bench/anywhere.py --json anywhere.json
    python bench/anywhere.py autoscaled_over_best

`autoscaled_over_best` (goal: at least 0.9): tokens per second of an emulated run with rollout.replicas=2:6,
which begins with two, over those of the best fixed number of replicas, the smallest that makes 97% of
what any makes; `replica_seconds_over_best` (goal: at most 1.15): its replica-seconds per token over that;
`gain_error` (goal: at most 0.15): the largest error of a predicted gain, as throughput. Real controller,
workers and messages, a process for each replica. Replica-seconds count from the start of a process.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import finish, options_of
from scaled_fleet import FEWEST, MOST, scaled_run

Row = dict[str, object]
STEPS, STEPS_FIXED = 120, 40
GOOD = 0.97


def autoscaled_over_best(folder: Path) -> tuple[dict[str, float], list[Row]]:
    """See the top of this file: the figures, and all runs."""
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


FIGURES: dict[str, Callable[[Path], tuple[dict[str, float], list[Row]]]] = {
    "autoscaled_over_best": autoscaled_over_best
}


def main() -> None:
    options = options_of(__doc__ or "")
    options.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}; default all")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="laminar-anywhere-") as folder:
        found = {name: FIGURES[name](Path(folder)) for name in given.figures or FIGURES}
    rows = [{"figure": name, **row} for name, (_, of) in found.items() for row in of]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    finish(
        given,
        {name: value for figures, _ in found.values() for name, value in figures.items()},
        rows,
        columns,
    )


if __name__ == "__main__":
    main()
