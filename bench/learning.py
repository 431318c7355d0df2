"""Does it learn, and only from its rewards? The example against the same run with its rewards shuffled over
each batch.

    python bench/learning.py --json learning.json     3 repeats of both, with seeds 0, 1, 2: about 20 minutes
                                                      on two cores
    python bench/learning.py --repeats 1

Figures: `gain` = held-out greedy accuracy after minus before, of the example; `gain_shuffled` the same of the
control, which has nothing to learn from and must stay near or below 0. Medians over repeats.
"""

import common

from laminar_hpc.report import summary

KEYS = (
    "accuracy_before",
    "accuracy_after",
    "accuracy_after_sampled",
    "trajectories_trained",
    "trajectories_to_070",
    "wall_seconds",
    "max_versions_per_trajectory",
)


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    rows = []
    with common.run_folder(options) as folder:
        for repeat in range(options.repeats):
            for rewards in ("own", "shuffled"):
                settings = {"seed": repeat, "algorithm.shuffle_rewards": str(rewards == "shuffled").lower()}
                found = summary.figures(common.train(options, folder, f"{rewards}-{repeat}", settings))
                gain = found["accuracy_after"] - found["accuracy_before"]
                rows.append(
                    {"rewards": rewards, "seed": repeat, "gain": gain, **{key: found[key] for key in KEYS}}
                )

    def figure(rewards: str, key: str) -> float | None:
        return common.median([row[key] for row in rows if row["rewards"] == rewards])

    figures = {
        "gain": figure("own", "gain"),
        "gain_shuffled": figure("shuffled", "gain"),
        **{key: figure("own", key) for key in KEYS if key != "max_versions_per_trajectory"},
        "max_versions_per_trajectory": max(row["max_versions_per_trajectory"] for row in rows),
    }
    common.finish(options, figures, rows, ("rewards", "seed", "gain", *KEYS))


if __name__ == "__main__":
    main()
