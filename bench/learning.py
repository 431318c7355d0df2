"""Does it learn, and only from its rewards? The example against the same run with its rewards shuffled over
each batch; and against other ways to learn it.

    python bench/learning.py --json learning.json     3 repeats of both, with seeds 0, 1, 2: about 20 minutes
                                                      on two cores
    python bench/learning.py --repeats 1 --kinds own,critic,taught,own_loss
                                                      beside PPO with a critic, beside on-policy
                                                      distillation from the model that the example ends with,
                                                      and with the loss of examples/objectives
    python bench/learning.py --kinds in_order data.train=few.jsonl rollout.replicas=2
                                                      the defaults of order and repack beside neither, with
                                                      prompts so few that each comes again and again

Figures: `gain` = held-out greedy accuracy after minus before, of the example; `gain_shuffled` the same of the
control, which has nothing to learn from and must stay near or below 0. `critic_over_own`, `taught_over_own`:
trajectories until the sampled accuracy, over 3 steps, is 0.95 of what the example ends with, over those of
the example; goals 2 and 0.5. `own_loss_equal`: 1 where the example's first batches, trained again with the
loss of examples/objectives and with the shipped one, give files of weights that are equal byte for byte.
Medians over repeats.
"""

import argparse
import os
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
    "taught": {"teacher.divergence": "reverse", "optimizer.lr": 2e-4, "steps": 30},
    "in_order": {"pipeline.dispatch": "in_order", "pipeline.repack": "off"},
}
OWN_LOSS = "own_loss"
REPLAYED = 5  # steps
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
COLUMNS = ("kind", "seed", "gain", "trajectories_to_goal", *KEYS)


def reached(run: Run, own: Run) -> int | None:
    """Trajectories until `run` samples as well as `own` nearly ends."""
    ends = statistics.fmean(step["accuracy_mean"] for step in own.steps[-summary.GOAL_STEPS :])
    return summary.trajectories_to_goal(run.steps, GOAL * ends)


def last_model(run_dir: Path) -> Path:
    return checkpoint_path(run_dir, steps(run_dir)[-1]) / "hf"


def own_loss_equal(options: argparse.Namespace, folder: Path, repeat: int) -> dict:
    """The first batches of the example trained again, with either loss."""
    source = {"source": f"replay:{folder / f'own-{repeat}'}", "seed": repeat, "steps": REPLAYED}
    weights = []
    for name, more in (("shipped", {}), ("own_loss", {"algorithm.loss": "my_objectives.loss"})):
        common.train(options, folder, f"{name}-{repeat}", {**source, **more})
        files = sorted(last_model(folder / f"{name}-{repeat}").glob("*.safetensors"))
        weights.append([file.read_bytes() for file in files])
    return {"kind": OWN_LOSS, "seed": repeat, "equal": float(bool(weights[0]) and weights[0] == weights[1])}


def kind_of(word: str) -> None:
    if word not in (*KINDS, OWN_LOSS):
        raise ValueError(f"{word!r} is none of {', '.join(KINDS)}, {OWN_LOSS}")


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument(
        "--kinds",
        type=common.words(kind_of),
        default=["own", "shuffled"],
        help=f"of {', '.join(KINDS)}, {OWN_LOSS}; own is always run (default own,shuffled)",
    )
    options = parser.parse_args()
    examples = str(common.ROOT / "examples" / "objectives")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (examples, os.environ.get("PYTHONPATH"))))
    kinds = ["own", *(kind for kind in options.kinds if kind not in ("own", OWN_LOSS))]
    rows: list[dict] = []
    with common.run_folder(options) as folder:
        for repeat in range(options.repeats):
            own = None
            for kind in kinds:
                settings = {"seed": repeat, **KINDS[kind]}
                if kind == "taught":
                    settings["teacher.model"] = last_model(folder / f"own-{repeat}")
                run = common.train(options, folder, f"{kind}-{repeat}", settings)
                own = own or run
                found = summary.figures(run)
                gain = found["accuracy_after"] - found["accuracy_before"]
                row = {"kind": kind, "seed": repeat, "gain": gain, "trajectories_to_goal": reached(run, own)}
                rows.append(row | {key: found[key] for key in KEYS})
            if OWN_LOSS in options.kinds:
                rows.append(own_loss_equal(options, folder, repeat))

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
        "max_versions_per_trajectory": max(row.get("max_versions_per_trajectory", 0) for row in rows),
    }
    if equal := [row["equal"] for row in rows if row["kind"] == OWN_LOSS]:
        figures["own_loss_equal"] = min(equal)
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
