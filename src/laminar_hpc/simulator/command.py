"""`laminar sim EXPERIMENT [key=value ...] [--json]`: a table across pipelines and scales, result.json and report.html."""

import dataclasses
import json
import sys
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator import report
from laminar_hpc.simulator.load import experiments, load
from laminar_hpc.simulator.sweep import sweep


def main(arguments: list[str]) -> int:
    words = [word for word in arguments if word != "--json"]
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise LaminarError(f"usage: laminar sim EXPERIMENT [key=value ...] [--json]; experiments: {', '.join(experiments())}")
    config = load(words[0], words[1:])
    rows = sweep(config, lambda line: print(line, file=sys.stderr, flush=True))
    folder = Path(config.out_dir or f"runs/sim-{config.name}")
    report.write(folder / "report.html", config.name, dataclasses.asdict(config), rows)
    result = json.dumps({"settings": dataclasses.asdict(config), "rows": report.as_json(rows)}, indent=1)
    (folder / "result.json").write_text(result + "\n")
    print(result if "--json" in arguments else f"{report.table(rows)}\n\nreport       {folder}/report.html")
    return 0
