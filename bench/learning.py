"""Does it learn, and only from its rewards? The example against the same run with its rewards shuffled over
each batch; and against other ways to learn it.

    python bench/learning.py --json learning.json     3 repeats of both, with seeds 0, 1, 2: about 20 minutes
                                                      on two cores
    python bench/learning.py --repeats 1 --kinds own,critic,taught
                                                      beside PPO with a critic, and beside on-policy
                                                      distillation from the model that the example ends with

Figures: `gain` = held-out greedy accuracy after minus before, of the example; `gain_shuffled` the same of the
control, which has nothing to learn from and must stay near or below 0. `critic_over_own`, `taught_over_own`:
trajectories until the sampled accuracy, over 3 steps, is 0.95 of what the example ends with, over those of
the example. Medians over repeats.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path

import common

from laminar_hpc.report import summary
from laminar_hpc.report.rundata import Run
from laminar_hpc.store.checkpoints import checkpoint_path, steps

KINDS: dict[str, Mapping[str, object]] = {
    "own": {},
    "shuffled": {"algorithm.shuffle_rewards": "true"},
    "critic": {"algorithm.advantage": "gae", "critic.lr": 2e-4, "critic.warmup_steps": 2, "steps": 120},
    "taught": {"teacher.coefficient": 1.0},
}
GOAL = 0.95  # of the sampled accuracy that the example ends with

KEYS = (
    "accuracy_before",
    "accuracy_after",
    "accuracy_after_sampled",
    "trajectories_trained",
    "trajectories_to_070",
    "wall_seconds",
    "max_versions_per_trajectory",
)


def reached(run: Run, own: Run) -> int | None:
    """Trajectories until `run` samples as well as `own` nearly ends."""
    ends = statistics.fmean(step["accuracy_mean"] for step in own.steps[-summary.GOAL_STEPS :])
    return summary.trajectories_to_goal(run.steps, GOAL * ends)


def last_model(run_dir: Path) -> Path:
    return checkpoint_path(run_dir, steps(run_dir)[-1]) / "hf"


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument(
        "--kinds",
        type=common.words(KINDS.__getitem__),
        default=["own", "shuffled"],
        help=f"of {', '.join(KINDS)}; own is always run (default own,shuffled)",
    )
    options = parser.parse_args()
    kinds = ["own", *(kind for kind in options.kinds if kind != "own")]
    rows = []
    with common.run_folder(options) as folder:
        for repeat in range(options.repeats):
            own: Run | None = None
            for kind in kinds:
                settings = {"seed": repeat, **KINDS[kind]}
                if kind == "taught":
                    settings["teacher.model"] = last_model(folder / f"own-{repeat}")
                run = common.train(options, folder, f"{kind}-{repeat}", settings)
                own = own or run
                found = summary.figures(run)
                gain = found["accuracy_after"] - found["accuracy_before"]
                goal = {"trajectories_to_goal": reached(run, own)}
                rows.append(
                    {"kind": kind, "seed": repeat, "gain": gain, **goal, **{key: found[key] for key in KEYS}}
                )

    def figure(kind: str, key: str) -> float | None:
        return common.median([row[key] for row in rows if row["kind"] == kind])

    def over_own(kind: str) -> float | None:
        found, own = figure(kind, "trajectories_to_goal"), figure("own", "trajectories_to_goal")
        return found / own if found and own else None

    figures = {
        "gain": figure("own", "gain"),
        **{f"gain_{kind}": figure(kind, "gain") for kind in kinds[1:]},
        **{f"{kind}_over_own": over_own(kind) for kind in ("critic", "taught") if kind in kinds},
        **{key: figure("own", key) for key in KEYS if key != "max_versions_per_trajectory"},
        "max_versions_per_trajectory": max(row["max_versions_per_trajectory"] for row in rows),
    }
    common.finish(options, figures, rows, ("kind", "seed", "gain", "trajectories_to_goal", *KEYS))


if __name__ == "__main__":
    main()
