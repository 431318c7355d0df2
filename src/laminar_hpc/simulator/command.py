"""`laminar sim EXPERIMENT [key=value ...] [--json]`: a table across pipelines and scales, result.json and
report.html. `laminar sim RUN_DIR`: finished/."""

import dataclasses
import json
import sys
import time
from argparse import Namespace

from laminar_hpc.simulator import report
from laminar_hpc.simulator.finished import command as finished
from laminar_hpc.simulator.settings import experiments, load_simulation, output_folder
from laminar_hpc.simulator.sweep import sweep

_PROGRESS_SECONDS = 4.0  # between two lines of progress


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Progress:
    """Says a line when none was said for a while."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, line: str) -> None:
        if time.monotonic() - self._said >= _PROGRESS_SECONDS:
            _say(line)
            self._said = time.monotonic()


def main(options: Namespace) -> int:
    """`laminar sim EXPERIMENT`: simulates, writes the page and result.json, prints the table. Returns 0."""
    name, *overrides = options.words
    if finished.is_run(name, experiments()):
        return finished.sim(name, overrides, options.json)
    config = load_simulation(name, overrides)
    folder = output_folder(config, f"runs/sim-{config.name}")
    rows = sweep(config, _say, folder / "ranges.json", _Progress())
    report.write(folder / "report.html", config.name, dataclasses.asdict(config), rows)
    result = json.dumps({"settings": dataclasses.asdict(config), "rows": report.as_json(rows)}, indent=1)
    (folder / "result.json").write_text(result + "\n")
    print(result if options.json else f"{report.table(rows)}\n\nreport       {folder}/report.html")
    return 0
