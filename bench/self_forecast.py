"""Forecasts of live runs beside what came of them: emulated engines, real controller, workers and messages.

    python bench/self_forecast.py --json self_forecast.json     some five minutes on two idle cores

A run with REPLICAS[0] replicas foretells its own step, and that of as many as REPLICAS[1]; then a run with
those is measured. Goals: 10% and 15%.
"""

import json
from pathlib import Path

import common

from laminar_hpc.simulator.emulation.launch import Emulation, prepare
from laminar_hpc.simulator.finished.measured import measure
from laminar_hpc.simulator.self_forecast import forecast

REPLICAS = (2, 4)
STEPS = 14
COLUMNS = ("replicas", "what", "foretold s per step", "measured", "error")


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


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--runs-dir", type=Path, help="keep the runs there (default: a temporary folder)")
    options.add_argument(
        "--run-seconds", type=float, default=600.0, help="time limit of one run (default 600)"
    )
    options = options.parse_args()
    rows = list[dict]()
    with common.run_folder(options) as folder:
        first, second = (run(folder / str(n), n, options.run_seconds) for n in REPLICAS)
        line = json.loads(json.dumps(forecast(first)))
        words = [f"rollout.replicas={REPLICAS[1]}"]
        more = next(other["figures"] for other in line["others"] if other["words"] == words)
        pairs = (
            (REPLICAS[0], "as it is", line["now"]["figures"], line["happened"]["step_seconds"]),
            (REPLICAS[1], "from the other run", more, measure(second).happened.step_seconds),
        )
        for replicas, what, foretold, measured in pairs:
            seconds = foretold["step_seconds"]
            figures = {"foretold s per step": seconds, "measured": measured, "error": seconds / measured - 1}
            rows.append({"replicas": replicas, "what": what, **figures})
    own, changed = (abs(row["error"]) for row in rows)
    common.finish(options, {"own_step_error": own, "changed_step_error": changed}, rows, COLUMNS)


if __name__ == "__main__":
    main()
