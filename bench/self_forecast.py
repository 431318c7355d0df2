"""Forecasts of live runs beside what came of them.

    python bench/self_forecast.py --json self_forecast.json     some five minutes on two idle cores
    python bench/self_forecast.py --only demo                   the demo alone, some three minutes

emulated   emulated engines, real controller, workers and messages: a run with REPLICAS[0] replicas foretells
           its own step, and that of as many as REPLICAS[1]; then a run with those is measured. Goals: 10% and
           15%.
demo       the demo, real in all its parts: half-way through it foretells its step, as `laminar top` has it
           done, beside the mean of the steps that come after. The load of the machine must not change
           meanwhile. Goal: 10%.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.machine.files import jsonl
from laminar_hpc.simulator.finished.measured import measure
from laminar_hpc.simulator.self_forecast import forecast

REPLICAS = (2, 4)
STEPS = 14
DEMO_STEPS = 40
COLUMNS = ("run", "what", "foretold s per step", "measured", "error")


def row(run: str, what: str, foretold: float, measured: float) -> dict:
    figures = {"foretold s per step": foretold, "measured": measured, "error": foretold / measured - 1}
    return {"run": run, "what": what, **figures}


def run(folder: Path, replicas: int, limit: float) -> Path:
    """An emulated run of so many replicas, to its end."""
    config = prepare(folder, 4_000, 100, 2048)
    config.steps, config.rollout.replicas, config.rollout.kv_cache_tokens = STEPS, replicas, 200_000
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 32, 8
    config.pipeline.refresh, config.pipeline.max_staleness = "drained", 2
    config.emulation.time_scale, config.emulation.model = 2.0, "7B"
    config.emulation.median_response_tokens, config.emulation.sigma = 400.0, 1.0
    config.rollout.max_concurrent = 32
    emulation = Emulation(config, 1.2e-4, per_process=4)
    try:
        code = emulation.wait(limit)
    finally:
        emulation.stop()
    if code != 0:
        raise SystemExit(f"the run of {replicas} replicas ended with {code}")
    return Path(config.run_dir)


def emulated(options: argparse.Namespace, folder: Path) -> tuple[dict, list[dict]]:
    """Of the run itself, and of twice as many replicas."""
    first, second = (run(folder / str(n), n, options.run_seconds) for n in REPLICAS)
    line = json.loads(json.dumps(forecast(first)))
    words = [f"rollout.replicas={REPLICAS[1]}"]
    more = next(other["figures"] for other in line["others"] if other["words"] == words)
    measured = measure(second).happened.step_seconds
    rows = [
        row(
            f"{REPLICAS[0]} replicas",
            "as it is",
            line["now"]["figures"]["step_seconds"],
            line["happened"]["step_seconds"],
        ),
        row(f"{REPLICAS[1]} replicas", "from the other run", more["step_seconds"], measured),
    ]
    own, changed = (abs(each["error"]) for each in rows)
    return {"own_step_error": own, "changed_step_error": changed}, rows


def step_times(directory: Path) -> dict[int, float]:
    """When each step of a run ended, in seconds."""
    file = directory / "metrics.jsonl"
    return (
        {each["step"]: each["time"] for each in jsonl.read(file) if each["kind"] == "step"}
        if file.exists()
        else {}
    )


def demo(options: argparse.Namespace, folder: Path) -> tuple[dict, list[dict]]:
    """A run of the demo, asked half-way through. Raises SystemExit where it was over before it could say."""
    name, deadline = "self-forecast", time.monotonic() + options.run_seconds
    steps = options.steps or DEMO_STEPS
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(common.train, options, folder, name, {"steps": steps})
        while len(step_times(folder / name)) < steps // 2 and time.monotonic() < deadline:
            if training.done():
                raise SystemExit(f"the demo was over before it could be asked: {training.exception()}")
            time.sleep(0.5)
        command = [sys.executable, "-m", "laminar_hpc.simulator.self_forecast", str(folder / name)]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=options.run_seconds, check=False
        )
        training.result()
    line = json.loads(said.stdout)
    if "why_not" in line:
        raise SystemExit(f"the demo could not say: {line['why_not']}")
    times = step_times(folder / name)
    later = sorted(step for step in times if step >= line["step"])
    measured = (times[later[-1]] - times[later[0]]) / (len(later) - 1)
    foretold = line["now"]["figures"]["step_seconds"]
    until = f"{line['happened']['step_seconds']:.3f} until then, responses {line['growth'] - 1:+.0%}"
    rows = [row("demo", f"after step {line['step']}; {until}", foretold, measured)]
    return {"demo_step_error": abs(rows[-1]["error"])}, rows


PARTS = {"emulated": emulated, "demo": demo}


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    options = options.parse_args()
    figures, rows = dict[str, float](), list[dict]()
    with common.run_folder(options) as folder:
        for name in options.only.split(","):
            found, more = PARTS[name](options, folder)
            figures |= found
            rows += more
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
