"""Laminar against the synchronous pipeline, on the example unchanged, each with its best thread settings;
then with rewards that wait.

    python bench/async_vs_sync.py --json async.json     thread settings first, then 3 pairs of each comparison
    python bench/async_vs_sync.py --laminar-threads 1,1 --sync-threads 2,2 --steps 20 --repeats 1

Runs alternate (sync, laminar, sync, laminar ...). Evaluations are left out, as they are outside the measured
window, and so are the first two steps. Thread settings are (trainer, rollout): the synchronous roles
alternate, so each may use all cores; laminar's roles run at once. The best of CANDIDATES by tokens per second
in one short run each is taken, unless given.

Waiting rewards: bench/rewards.py (log-normal, median 0.2 s, 99th percentile 3 s), with more reward slots than
a batch has trajectories; both pipelines score as trajectories finish. `ideal_waiting` is what a perfect
overlap of these waits would give: in the synchronous runs, the time per step over the time per step in which
any process was busy.

`waiting_of_bound` is laminar's share of what its staleness bound b allows: the mean step that is left of the
run when nobody hesitates, over its own. The replica begins batch i when it has ended the one before and
weights i - b are there; the trainer trains it when it has trained the one before and the last response of the
batch is scored. Each batch has its own longest wait; trainer and replica take their mean seconds, which makes
it an estimate that a run may exceed by some hundredths. All of it is of the same run.

Goals: `speedup_waiting` at least 0.85 of min(`ideal_waiting`, 2.5), `waiting_of_bound` at least 0.95. The
other figures are reported as they are; the table shows where the time goes, in seconds per step.
"""

import argparse
import statistics

import common
import rewards

from laminar_hpc.report.rundata import Consumed, Run

CANDIDATES = {"sync": [(1, 1), (2, 2)], "laminar": [(1, 1), (2, 1), (1, 2)]}
TUNE_STEPS = 8
SKIP = 2
COLUMNS = (
    "rewards",
    "pipeline",
    "threads",
    "repeat",
    "tokens/s",
    "s to 0.70",
    "all",
    "work",
    "trainer train",
    "trainer wait",
    "trainer publish",
    "rollout generate",
    "rollout wait",
    "rollout pull",
    "longest score",
    "shortest step",
    "staleness",
)


def threads(text: str) -> tuple[int, int]:
    """TRAINER,ROLLOUT"""
    trainer, rollout = (int(part) for part in text.split(","))
    return trainer, rollout


def measure(
    options: argparse.Namespace,
    folder,
    pipeline: str,
    setting: tuple[int, int],
    waiting: bool,
    name: str,
    **more: object,
) -> dict:
    """One run and its row of the table."""
    settings = {
        "pipeline": pipeline,
        "trainer.threads": setting[0],
        "rollout.threads": setting[1],
        "evaluation.files": "[]",
        **more,
    }
    if waiting:
        settings |= {
            "reward.function": "bench.rewards.waiting",
            "reward.slots": options.slots,
            "reward.timeout_seconds": rewards.TIMEOUT_SECONDS,
        }
    run = common.train(options, folder, name, settings)
    seconds, scoring = common.seconds_per_step(run, SKIP), longest_scores(run)
    return {
        "rewards": "waiting" if waiting else "own",
        "pipeline": pipeline,
        "threads": f"{setting[0]},{setting[1]}",
        "tokens/s": common.tokens_per_second(run, SKIP),
        "s to 0.70": common.seconds_to_accuracy(run),
        **seconds,
        "longest score": statistics.fmean(scoring),
        "shortest step": shortest_step(run, seconds, scoring),
        "staleness": sum(s["staleness_training_mean"] for s in run.steps) / len(run.steps),
    }


def longest_scores(run: Run) -> list[float]:
    """Seconds from the last token of each local batch until all of it is scored."""
    batches: dict[int, list[Consumed]] = {}
    for trajectory in run.consumed:
        batches.setdefault(trajectory.weight_id, []).append(trajectory)
    return [
        max(t.time_scored for t in batch) - max(t.time_finished for t in batch)
        for _, batch in sorted(batches.items())
    ]


def shortest_step(run: Run, seconds: dict[str, float], scoring: list[float]) -> float:
    """Seconds: what the docstring of the file says."""
    bound = run.config["pipeline"]["max_staleness"]
    trainer = seconds["trainer train"] + seconds["trainer publish"]
    replica = seconds["rollout generate"] + seconds["rollout pull"]
    published, generated = [0.0], 0.0
    for batch, waits in enumerate(scoring):
        generated = max(generated, published[max(0, batch - bound)]) + replica
        published.append(max(published[-1], generated + waits) + trainer)
    return published[-1] / len(scoring)


def best_threads(options: argparse.Namespace, folder, pipeline: str, rows: list[dict]) -> tuple[int, int]:
    """The given setting, or the best candidate in a short run."""
    given = getattr(options, f"{pipeline}_threads")
    if given:
        return given
    found = []
    for setting in CANDIDATES[pipeline]:
        name = f"tune-{pipeline}-{setting[0]}-{setting[1]}"
        row = measure(options, folder, pipeline, setting, False, name, steps=TUNE_STEPS)
        rows.append({**row, "repeat": "tune"})
        found.append((row["tokens/s"], setting))
    return max(found)[1]


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--laminar-threads", type=threads, help="TRAINER,ROLLOUT instead of measuring the candidates"
    )
    options.add_argument("--sync-threads", type=threads, help="the same for sync")
    options.add_argument(
        "--slots", type=int, default=1024, help="reward calls in flight in the runs that wait (default 1024)"
    )
    options.add_argument("--only", choices=("own", "waiting"), help="one of the two comparisons")
    options = options.parse_args()
    rows: list[dict] = []
    pairs: dict[bool, list[tuple[dict, dict]]] = {False: [], True: []}
    with common.run_folder(options) as folder:
        setting = {pipeline: best_threads(options, folder, pipeline, rows) for pipeline in CANDIDATES}
        for waiting in (False, True):
            if options.only == ("own" if waiting else "waiting"):
                continue
            for repeat in range(options.repeats):
                pair = []
                for pipeline in ("sync", "laminar"):
                    name = f"{'waiting' if waiting else 'own'}-{pipeline}-{repeat}"
                    row = measure(options, folder, pipeline, setting[pipeline], waiting, name, seed=repeat)
                    pair.append({**row, "repeat": repeat})
                rows += pair
                pairs[waiting].append((pair[0], pair[1]))

    def speedup(waiting: bool) -> float | None:
        return common.median(
            [laminar["tokens/s"] / sync["tokens/s"] for sync, laminar in pairs[waiting]] or [None]
        )

    figures = {
        "speedup_tokens": speedup(False),
        "speedup_time_to_accuracy": common.median(
            [ratio(sync["s to 0.70"], laminar["s to 0.70"]) for sync, laminar in pairs[False]] or [None]
        ),
        "speedup_waiting": speedup(True),
        "waiting_of_bound": common.median(
            [laminar["shortest step"] / laminar["all"] for _, laminar in pairs[True]] or [None]
        ),
        "ideal_waiting": common.median([sync["all"] / sync["work"] for sync, _ in pairs[True]] or [None]),
    }
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
