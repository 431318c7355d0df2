"""What staleness costs and what it brings: tokens/s by the simulator at the Laminar paper's setting, and
accuracy at equal trajectories in real runs of the example whose data are as stale as each bound allows.

    python bench/staleness.py --json staleness.json      both: two hours on two cores
    python bench/staleness.py --only simulator           ten minutes
    python bench/staleness.py --only learning --bounds 0,8 --repeats 1

Simulator: 72B on 1,024 H800, three quarters of which train, lengths as the paper's
(bench/simulator_headline.py), 60 steps of which 40 count. `auto` is pipeline.max_staleness=auto.

Learning: one replica whose local batch is bound + 1 steps long, so that data are as stale as the bound
allows, which they are not in a usual run of the example; 128 trajectories a step. Short responses of a local
batch are trained first, so a step's own accuracy rises and falls with its staleness: `heldout`, greedy after
the run, is what compares.

Figures: `auto_over_best_fixed`, `auto_over_N` of tokens/s; `heldout_lost_at_N`, that of bound 0 less that of
N. Medians over the seeds.
"""

import argparse
import dataclasses
import statistics
from pathlib import Path

import common
from simulator_headline import configuration

from laminar_hpc.report import summary
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.sweep import point, split

GROUPS = 16  # prompts a step of a learning run
STEPS = 48  # of a learning run, unless --steps says otherwise
SIMULATED = 60
WARMUP = 20
COLUMNS = (
    *("bound", "seed", "tokens/s", "trainer waits", "rollouts idle", "stale mean", "stale max"),
    *("accuracy", "heldout"),
)


def simulated(bound: int | None) -> dict:
    """A row of tokens/s; None: the bound that adapts."""
    config = dataclasses.replace(
        configuration("72B", 1024, WorkloadConfig()),
        steps=SIMULATED,
        warmup_steps=WARMUP,
        max_staleness=bound,
    )
    trainer = split(dataclasses.replace(config, trainer_share=0.75), "laminar", 1024)
    found = point(
        config, "laminar" if bound is not None else "laminar_auto", 1024, trainer, SIMULATED
    ).figures
    return {
        "bound": "auto" if bound is None else bound,
        "tokens/s": found["tokens_per_second"],
        "trainer waits": found["trainer_wait_share"],
        "rollouts idle": found["rollout_idle_share"],
        "stale mean": found["staleness_training_mean"],
        "stale max": found["staleness_training_max"],
    }


def learned(options: argparse.Namespace, folder: Path, bound: int, seed: int) -> dict:
    """A row of one run; `accuracy` is the mean over its last quarter."""
    settings = {
        "seed": seed,
        "algorithm.prompts_per_step": GROUPS,
        "algorithm.samples_per_prompt": 8,
        "pipeline.max_staleness": bound,
        "pipeline.local_batch_groups": GROUPS * (bound + 1),
        "evaluation.problems": 200,
        "evaluation.samples": 0,
    }
    run = common.train(options, folder, f"bound{bound}-{seed}", settings)
    found, course = summary.figures(run), [step["accuracy_mean"] for step in run.steps]
    return {
        "bound": bound,
        "seed": seed,
        "stale mean": found["staleness_training_mean"],
        "stale max": found["staleness_training_max"],
        "accuracy": statistics.fmean(course[-len(course) // 4 :]),
        "heldout": found["accuracy_after"],
    }


def figures_of(rates: list[dict], runs: list[dict], bounds: list[int]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    rate = {row["bound"]: row["tokens/s"] for row in rates}
    if rate:
        figures["auto_over_best_fixed"] = rate["auto"] / max(rate[bound] for bound in bounds)
        figures |= {f"auto_over_{bound}": rate["auto"] / rate[bound] for bound in bounds}

    def heldout(bound: int) -> float | None:
        return common.median([row["heldout"] for row in runs if row["bound"] == bound])

    on_policy = heldout(0)
    for bound in bounds:
        found = heldout(bound)
        if on_policy is not None and found is not None:
            figures[f"heldout_lost_at_{bound}"] = on_policy - found
    return figures


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument("--only", choices=("simulator", "learning"), help="one of the two")
    options.add_argument(
        "--bounds", type=common.words(int), default=["0", "2", "4", "8"], help="default 0,2,4,8"
    )
    options = options.parse_args()
    options.steps = options.steps or STEPS
    bounds = [int(bound) for bound in options.bounds]
    rates = [simulated(bound) for bound in [*bounds, None]] if options.only != "learning" else []
    runs: list[dict] = []
    with common.run_folder(options) as folder:
        for seed in range(options.repeats) if options.only != "simulator" else ():
            runs += [learned(options, folder, bound, seed) for bound in bounds]
    common.finish(options, figures_of(rates, runs, bounds), [*rates, *runs], COLUMNS)


if __name__ == "__main__":
    main()
