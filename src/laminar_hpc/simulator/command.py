"""`laminar sim EXPERIMENT [key=value ...] [--json]`: a table across pipelines and scales, result.json and
report.html. With --without or --staleness: worth.py. `laminar sim RUN_DIR`: finished/."""

import dataclasses
import json
import time
from argparse import Namespace
from collections.abc import Callable

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator import report, worth
from laminar_hpc.simulator.finished import command as finished
from laminar_hpc.simulator.schema import SimulationConfig
from laminar_hpc.simulator.settings import experiments, load_simulation, output_folder, say
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


def main(options: Namespace) -> int:
    """`laminar sim EXPERIMENT`: simulates, writes the page and result.json, prints the table. Returns 0."""
    name, *overrides = options.words
    if options.without and options.staleness:
        raise LaminarError("--without and --staleness are two tables: ask for one of them")
    pipelines = vars(options)["as"]
    if finished.is_run(name, experiments()):
        if options.without or options.staleness:
            raise LaminarError("--without and --staleness are asked of an EXPERIMENT; of a run ask --as")
        if pipelines:
            return finished.sim_as(name, overrides, pipelines, options.json)
        return finished.sim(name, overrides, options.json)
    if pipelines:
        raise LaminarError(f"--as={pipelines} is asked of a RUN_DIR; of an experiment ask pipelines=[...]")
    config = load_simulation(name, overrides)
    if options.without or options.staleness:
        return _worth(config, options)
    folder = output_folder(config, f"runs/sim-{config.name}")
    rows = sweep(config, say, folder / "ranges.json", _progress())
    settings = dataclasses.asdict(config)
    (folder / "report.html").write_text(report.document(config.name, settings, rows), encoding="utf-8")
    result = json.dumps({"settings": settings, "rows": report.as_json(rows)}, indent=1)
    (folder / "result.json").write_text(result + "\n")
    print(result if options.json else f"{report.table(rows)}\n\nreport       {folder}/report.html")
    return 0


def _worth(config: SimulationConfig, options: Namespace) -> int:
    """What mechanisms, or staleness bounds, are worth. Returns 0."""
    if options.without:
        rows = worth.without(config, worth.names_of(options.without), say)
    else:
        rows = worth.at_bounds(config, worth.bounds_of(options.staleness), say)
    print(
        json.dumps([dataclasses.asdict(row) for row in rows], indent=1) if options.json else worth.table(rows)
    )
    return 0
