"""`laminar sim EXPERIMENT [key=value ...] [--json]`: a table across pipelines and scales, result.json and
report.html. `laminar sim RUN_DIR`: finished/."""

import dataclasses
import json
import time
from collections.abc import Callable

from laminar_hpc.simulator import report
from laminar_hpc.simulator.finished import command as finished
from laminar_hpc.simulator.settings import experiments, load_simulation, output_folder, say, take_apart
from laminar_hpc.simulator.sweep import sweep

_PROGRESS_SECONDS = 4.0  # between two lines of progress


def _progress() -> Callable[[str], None]:
    """What says a line when none was said for a while."""
    said = time.monotonic()

    def tell(line: str) -> None:
        nonlocal said
        if time.monotonic() - said >= _PROGRESS_SECONDS:
            say(line)
            said = time.monotonic()

    return tell


def main(arguments: list[str]) -> int:
    """`laminar sim EXPERIMENT`: simulates, writes the page and result.json, prints the table. Returns 0."""
    name, overrides, as_json = take_apart(arguments, "sim", "experiment", experiments())
    if finished.is_run(name, experiments()):
        return finished.sim(name, overrides, as_json)
    config = load_simulation(name, overrides)
    folder = output_folder(config, f"runs/sim-{config.name}")
    rows = sweep(config, say, folder / "ranges.json", _progress())
    report.write(folder / "report.html", config.name, dataclasses.asdict(config), rows)
    result = json.dumps({"settings": dataclasses.asdict(config), "rows": report.as_json(rows)}, indent=1)
    (folder / "result.json").write_text(result + "\n")
    print(result if as_json else f"{report.table(rows)}\n\nreport       {folder}/report.html")
    return 0
