"""The simulator against published figures, and how fast it is.

    python bench/simulator.py --json simulator.json     everything: some ten minutes on one core
    python bench/simulator.py --only dora,repack --json simulator.json     parts of it; the others are kept

decode       decode steps beside published ones. Goal: 7B on H100 within 15% at every batch size.
trainer      trainer steps beside published ones, and their scaling with GPUs. Goal: within 20%.
runs         whole published runs with known inputs, kept apart from every fit. Goal: within 20%.
dora         eight rows of DORA's table (arXiv 2604.26256), Qwen2.5-32B. Goal: tokens/s within 15%.
repack       Laminar's ablation (arXiv 2510.12633), 64 + 64 GPUs. Goal: gain 1.26 within 0.08, KV use 71.6%
             and 82.2% within 6 points.
headline     Laminar's speed-ups on math, 7B, 32B, 72B at three scales each; published splits where there are
             any, else the best of a few.
tools        the same over sync for tool calling, 7B.
speed        `laminar`, 20 steps: 1,024 GPUs with 8,192 trajectories (3 s), 16,384 GPUs with 131,072 (45 s).
             CPU seconds of one core.
plan         `laminar plan` for 64 H800 + 64 H20 (120 s), and a coarse grid of splits that it must not fall
             behind.
sensitivity  each constant 20% down and up; only when named.
live         the demo, run --repeats times, each beside what `laminar sim RUN_DIR` says of it. Goal: tokens/s
             within 10%, shares within 10 points.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path

import common
from simulator_checks import decode, runs, trainer
from simulator_papers import dora, over_seeds, repack, repack_alternatives, row

from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.finished.measured import measure
from laminar_hpc.simulator.finished.prediction import predict
from laminar_hpc.simulator.plan import Candidate, describe, evaluate, search
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import Outcome, simulate
from laminar_hpc.simulator.schema import SimulationConfig, WorkloadConfig
from laminar_hpc.simulator.settings import load_plan, load_simulation
from laminar_hpc.simulator.setup import setup
from laminar_hpc.simulator.sweep import point, split
from laminar_hpc.simulator.tables import GPUS, MODELS

SCALES = {"32B": (32, 128, 512), "72B": (64, 256, 1024), "7B": (16, 64, 256)}
TOOLS_SCALES = {"7B": (16, 64, 256)}
PUBLISHED = {"sync": (2.56, 5.48), "one_step": (1.98, None), "stream": (1.93, None), "partial": (1.39, None)}
# Published shares of the trainer: 72B on 1,024 and 32B on 128.
SPLITS = {
    ("72B", 1024): {"laminar_unbounded": 0.75, "one_step": 0.25, "stream": 0.25, "partial": 0.625},
    ("32B", 128): dict.fromkeys(("laminar_unbounded", "one_step", "stream", "partial"), 0.5),
}
AT_MOST_ONE = ("kv_memory_share", "kv_memory_share_colocated", "new_token_ratio", "repack_kv_share")
COLUMNS = ("part", "what", "published", "simulated", "error", "note")


def best_rate(config: SimulationConfig, name: str, gpus: int) -> tuple[float, int]:
    """Tokens/s and the trainer's GPUs: of the known split, else of the best of all."""
    trainer = split(config, name, gpus)
    return point(config, name, gpus, trainer, config.steps).figures["tokens_per_second"], trainer


def headline(
    rows: list[dict],
    part: str,
    work: WorkloadConfig,
    scales: dict[str, tuple[int, ...]],
    published: dict[str, tuple[float, float | None]],
) -> dict[str, float]:
    """Mean speed-ups of Laminar, and a row for each model, scale and pipeline."""
    ratios: dict[str, list[float]] = {name: [] for name in published}
    for model, gpus in ((model, n) for model, counts in scales.items() for n in counts):
        config = SimulationConfig(
            model=model,
            steps=5,
            warmup_steps=2,
            splits=SPLITS.get((model, gpus), {}),
            workload=work,
            cuda_graphs=False,  # as conf/simulation/experiment/laminar.yaml
        )
        ours, trainer = best_rate(config, "laminar_unbounded", gpus)
        for name in published:
            rate, other = best_rate(config, name, gpus)
            ratios[name].append(ours / rate)
            note = f"{ours:,.0f} / {rate:,.0f} tokens/s; train {trainer} / {other}"
            rows.append(row(part, f"{model} {gpus}: over {name}", None, ours / rate, note))
    for name, (mean, most) in published.items():
        rows.append(row(part, f"mean over {name}", mean, statistics.fmean(ratios[name])))
        if most:
            rows.append(row(part, f"max over {name}", most, max(ratios[name])))
    largest = len(next(iter(scales.values()))) - 1  # each model's last
    if part == "headline":
        rows.append(
            row(
                part,
                "mean over sync at the largest scales",
                3.34,
                statistics.fmean(ratios["sync"][largest :: largest + 1]),
            )
        )
    return {f"speedup_over_{name}": statistics.fmean(found) for name, found in ratios.items()}


def timed(gpus: int, prompts: int, name: str = "laminar") -> tuple[float, Outcome]:
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
            for field in dataclasses.fields(happened):
                values = getattr(happened, field.name), getattr(simulated, field.name)
                rows.append(row("live", f"run {index}: {field.name}", *values))
            errors.append(abs(simulated.tokens_per_second / happened.tokens_per_second - 1))
    return {"live_tokens_error": common.median(errors)}


def sensitivity(rows: list[dict], dora_config: SimulationConfig, repack_config: SimulationConfig) -> None:
    """What 20% less and more of each constant does to each headline: one seed, shorter runs. A row is a
    constant, a factor and a figure."""
    short = dataclasses.replace(dora_config, steps=5, warmup_steps=2)
    ablation = dataclasses.replace(repack_config, steps=5, warmup_steps=2)
    large = SimulationConfig(
        gpus=[512],
        steps=4,
        warmup_steps=2,
        cuda_graphs=False,
        splits={"laminar_unbounded": 0.625, "one_step": 0.25},
    )

    def figures(constants: dict[str, float]) -> dict[str, float]:
        a, b = (dataclasses.replace(config, constants=constants) for config in (short, large))
        sync, async_ = (over_seeds(a, name, 128, (0,))["tokens_per_second"] for name in ("sync", "dora"))
        ours, other, one = (
            over_seeds(b, name, 512, (0,))["tokens_per_second"]
            for name in ("laminar_unbounded", "sync", "one_step")
        )
        found = repack([], dataclasses.replace(ablation, constants=constants), (0,))
        return {
            "DORA's sync, 128 GPUs": sync,
            "DORA, 128 GPUs": async_,
            "repack gain": found["repack_gain"],
            "KV use without": found["kv_use_without"],
            "over sync, 512 GPUs": ours / other,
            "over one-step, 512 GPUs": ours / one,
        }

    base = figures({})
    for field in dataclasses.fields(Constants):
        for factor in (0.8, 1.2):
            value = getattr(DEFAULT, field.name) * factor
            if field.name in AT_MOST_ONE:
                value = min(value, 1.0)
            found = figures({field.name: value})
            for key in base:
                rows.append(row("sensitivity", f"{field.name} x {factor}: {key}", base[key], found[key]))


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
        default="decode,trainer,runs,dora,repack,headline,tools,speed,plan,live",
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
    if "dora" in parts:
        figures |= dora(rows, dora_config)
    if "repack" in parts:
        figures |= repack(rows, repack_config)
        repack_alternatives(rows, repack_config)
    if "headline" in parts:
        figures |= headline(rows, "headline", WorkloadConfig(), SCALES, PUBLISHED)
    if "tools" in parts:
        found = headline(
            rows, "tools", load_simulation("tools", []).workload, TOOLS_SCALES, {"sync": (2.62, 5.42)}
        )
        figures["tools_speedup_over_sync"] = found["speedup_over_sync"]
    if "speed" in parts:
        figures |= speed(rows)
    if "live" in parts:
        figures |= live(rows, options)
    if "plan" in parts:
        figures |= plan_search(rows)
    if "sensitivity" in parts:
        sensitivity(rows, dora_config, repack_config)
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
