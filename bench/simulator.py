"""The simulator against published figures, and how fast it is.

    python bench/simulator.py --json simulator.json     everything: some ten minutes on one core
    python bench/simulator.py --only dora,repack --json simulator.json     parts of it; the others are kept

decode       decode steps beside published ones. Goal: 7B on H100 within 15% at every batch size.
trainer      trainer steps beside published ones, and their scaling with GPUs. Goal: within 20%. Layers with
             experts beside what they were fitted to.
runs         whole published runs with known inputs, and their phases, kept apart from every fit. Goal:
             within 20%.
coverage     the share of further draws of the constants in ranges of eight. Goal: 0.75 to 0.85. The share of
             the published runs in the ranges of their recipes.
dora         eight rows of DORA's table (arXiv 2604.26256), Qwen2.5-32B. Goal: tokens/s within 15%.
repack       Laminar's ablation (arXiv 2510.12633), 64 + 64 GPUs. Goal: gain 1.26 within 0.08, KV use 71.6%
             and 82.2% within 6 points.
headline     Laminar's speed-ups on math, 7B, 32B, 72B at three scales each, as a table beside the published;
             published splits where there are any, else the best of all. Goal: means and maximum within 20%.
assumptions  what each thing that the paper leaves open does to the speed-ups at the published splits.
tools        the same over sync for tool calling, 7B.
speed        `laminar`, 20 steps: 1,024 GPUs with 8,192 trajectories (3 s), 16,384 GPUs with 131,072 (45 s).
             CPU seconds of one core.
scale        1 to 49 trainer groups of 4,096 GPUs each, 3 steps: CPU seconds of one core (600 s), memory
             (4 GiB).
plan         `laminar plan` for 64 H800 + 64 H20 (120 s), and a coarse grid of splits that it must not fall
             behind.
sensitivity  each constant one standard deviation down and up, and all drawn together; only when named.
live         the demo, run --repeats times, each beside what `laminar sim RUN_DIR` says of it. Goal: tokens/s
             within 10%, shares within 10 points.
"""

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path

import common
import simulator_headline as headline
from simulator_checks import decode, trainer
from simulator_coverage import coverage, published_inside
from simulator_experts import experts
from simulator_papers import dora, repack, repack_alternatives, row
from simulator_runs import runs
from simulator_scale import scale
from simulator_sensitivity import sensitivity

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.divisions import Candidate, describe
from laminar_hpc.simulator.finished.measured import SPLIT, Figures, measure
from laminar_hpc.simulator.finished.prediction import predict
from laminar_hpc.simulator.plan import evaluate, search
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import SimulationOutcome, simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.settings import load_plan, load_simulation
from laminar_hpc.simulator.setup import setup
from laminar_hpc.simulator.tables import GPUS, MODELS

COLUMNS = ("part", "what", "published", "simulated", "error", "note")


def timed(gpus: int, prompts: int, name: str = "laminar") -> tuple[float, SimulationOutcome]:
    """CPU seconds of a 32B run of 20 steps with half of the GPUs for training."""
    gpu, model = GPUS["H800"], MODELS["32B"]
    work = WorkloadConfig(prompts_per_step=prompts)
    run = setup(
        PIPELINES[name],
        model,
        gpu,
        gpus // 2,
        [(gpu, gpus // 2, model.tensor_parallel, None)],
        work,
        DEFAULT,
        steps=20,
        warmup_steps=5,
    )
    start = time.process_time()
    outcome = simulate(run)
    return time.process_time() - start, outcome


def speed(rows: list[dict]) -> dict[str, float]:
    """As many trajectories per step as 8 per GPU. Without a staleness bound many more are generated than are
    trained."""
    figures = {}
    for gpus, name in ((1024, "laminar"), (4096, "laminar"), (16384, "laminar"), (1024, "laminar_unbounded")):
        seconds, outcome = timed(gpus, gpus // 2, name)
        trained = 20 * 16 * gpus // 2
        generated = outcome.figures["finished_trajectories"]
        note = (
            f"{generated:,} generated, {seconds / generated * 1e6:.0f} us each; "
            f"{outcome.figures['events']:,} events"
        )
        limit = {1024: 3.0, 16384: 45.0}.get(gpus)
        rows.append(
            row(
                "speed", f"{name}, {gpus} GPUs, {trained:,} trajectories trained: CPU s", limit, seconds, note
            )
        )
        figures.setdefault(f"seconds_{gpus}_gpus", seconds)
    return {key: value for key, value in figures.items() if key != "seconds_4096_gpus"}


def plan_search(rows: list[dict]) -> dict[str, float]:
    """`laminar plan mixed`, and a coarse grid of what it could have said: every quarter of either pool
    trains, TP4 everywhere."""
    config = load_plan("mixed", [])
    start = time.process_time()
    plan = search(config)
    seconds = time.process_time() - start
    note = f"{describe(config, plan.best.candidate)}; {plan.simulated} of {plan.candidates} simulated"
    rows.append(row("plan", "64 H800 + 64 H20: CPU s", 120.0, seconds, note))
    grid = []
    for pool, train in itertools.product((0, 1), (16, 32, 48, 64)):
        left = tuple((other, 64 - (train if other == pool else 0), 4) for other in (0, 1))
        candidate = Candidate(pool, train, tuple(part for part in left if part[1]))
        grid.append((evaluate(config, candidate)["tokens_per_second"], describe(config, candidate)))
        rows.append(row("plan", "grid, tokens/s", None, *grid[-1]))
    rows.append(row("plan", "best of the grid against the plan", plan.best.score, max(grid)[0], max(grid)[1]))
    return {"plan_seconds": seconds, "plan_over_grid": plan.best.score / max(grid)[0]}


def live(rows: list[dict], options: argparse.Namespace) -> dict[str, float | None]:
    """Runs of the demo (or --live), each beside its own simulation. Shares are of the window, the first two
    steps left out."""
    errors = []
    with common.run_folder(options) as folder:
        runs = options.live or [
            common.train(options, folder, f"live-{seed}", {"seed": seed}).directory
            for seed in range(options.repeats)
        ]
        for index, directory in enumerate(runs):
            measured = measure(directory)
            happened, simulated = measured.happened, predict(measured)
            for name, value in numbers(happened).items():
                rows.append(row("live", f"run {index}: {name}", value, numbers(simulated)[name]))
            errors.append(abs(simulated.tokens_per_second / happened.tokens_per_second - 1))
    return {"live_tokens_error": common.median(errors)}


def numbers(figures: Figures) -> dict[str, float]:
    """By name; with several turns also the seconds of a trajectory, and the shares of what they go to."""
    found = dataclasses.asdict(figures)
    found.pop("split")
    if (split := figures.split) is not None:
        found["trajectory_seconds"] = split.seconds
        found |= {f"{kind}_share": share for kind, share in zip(SPLIT, split.shares, strict=True)}
    return found


def kept(path: Path | None, parts: list[str]) -> tuple[dict, list[dict]]:
    """Figures and rows of an earlier file, without the rows of the parts that are run again."""
    if path is None or not path.exists():
        return {}, []
    earlier = json.loads(path.read_text())
    return earlier["figures"], [
        found for found in earlier["rows"] if found["part"].partition(" ")[0] not in parts
    ]


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--only",
        default="decode,trainer,runs,coverage,dora,repack,headline,assumptions,tools,speed,scale,plan,live",
        help="parts, separated by commas",
    )
    options.add_argument(
        "--live",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="finished runs to predict instead of new runs of the demo",
    )
    options = options.parse_args()
    parts = options.only.split(",")
    figures, rows = kept(options.json, parts)
    dora_config, repack_config = load_simulation("dora", []), load_simulation("repack", [])
    for name, part in (("decode", decode), ("trainer", trainer), ("runs", runs)):
        if name in parts:
            figures |= part(rows)
    if "trainer" in parts:
        experts(rows)
    if "coverage" in parts:
        figures |= coverage(rows) | published_inside(rows)
    if "dora" in parts:
        figures |= dora(rows, dora_config)
    if "repack" in parts:
        figures |= repack(rows, repack_config)
        repack_alternatives(rows, repack_config)
    if "headline" in parts:
        figures |= headline.speedups(rows, "headline", WorkloadConfig(), headline.SCALES, headline.MATH)
        print(headline.table(rows) + "\n")
    if "assumptions" in parts:
        headline.assumptions(rows)
    if "tools" in parts:
        work = load_simulation("tools", []).workload
        figures |= headline.speedups(rows, "tools", work, headline.TOOLS_SCALES, headline.TOOLS)
    if "speed" in parts:
        figures |= speed(rows)
    if "scale" in parts:
        figures |= scale(rows)
    if "live" in parts:
        figures |= live(rows, options)
    if "plan" in parts:
        figures |= plan_search(rows)
    if "sensitivity" in parts:
        sensitivity(rows)
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
