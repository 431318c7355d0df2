"""A run of Slurm jobs that is requeued again and again, beside the same run without, for as many steps.

    python bench/requeues.py --json requeues.json       some fifteen minutes on two cores; needs root

The nodes are those of a real Slurm on this machine (bench/slurm_cluster.py), the jobs those of
`laminar submit --apart`. `--requeues` times the trainers' job is told of its end, by USR1 as before its time
limit and by preemption in turn, each time when it has trained `--between` steps since the last one. Nobody
submits anything again: that job requeues itself, the others go on.

A row per requeue: `step` at which it struck, `reason` that the run recorded, seconds from the signal until
the trainers had left (`left`), and until the next step was trained (`back`).

steps, steps_alone          the last step of each; goal: as configured, both
accuracy, accuracy_alone    of the trained batches, the mean of the last ten steps
submissions                 goal 1
trained_again               steps that were trained a second time; goal 0
audit_culprits, responses_lost   of the run with requeues; goal 0
"""

import argparse
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path

import common
from chaos import Watch, accuracies
from faults import seconds_until_back
from roles import audited, steps_done
from slurm_cluster import SlurmCluster, missing
from slurm_jobs import SlurmRun

from laminar_hpc.machine.files import jsonl
from laminar_hpc.report import rundata
from laminar_hpc.report.rundata import Run

KINDS = ("usr1-trainer", "preempt-trainer")
COLUMNS = ("requeue", "step", "reason", "left", "back", "load")
NODES, SLURMD_TIMEOUT = 4, 60


def trained(
    options: argparse.Namespace, cluster: SlurmCluster, name: str, requeues: int
) -> tuple[SlurmRun, Run, list[dict]]:
    """A run to its end, its records, and a row for each requeue."""
    words = [f"experiment={options.experiment}", f"steps={options.steps}", "evaluation.files=[]"]
    run, rows = SlurmRun(cluster, name, [*words, *options.overrides], options.rollouts), list[dict]()
    run.submit()
    watch = Watch(run, options.limit)
    for kind in islice(cycle(KINDS), requeues):
        goal = steps_done(run.run_dir) + options.between
        watch.until(lambda goal=goal: steps_done(run.run_dir) >= goal)
        before = len(draining(run))
        rows.append({"requeue": kind, **watch.until_struck(kind, options.seed)})
        print(f"  {name}: {kind} at step {rows[-1]['step']}", file=sys.stderr, flush=True)
        watch.until(lambda before=before: len(draining(run)) > before)
    watch.until(lambda: run.is_done and not run.elements())
    found = rundata.load(run.run_dir)
    return run, found, [row | aftermath(found, draining(run), row) for row in rows]


def draining(run: SlurmRun) -> list[dict]:
    return list(jsonl.read(run.run_dir / "metrics.jsonl", "gang_ended"))


def aftermath(found: Run, left: list[dict], row: dict) -> dict[str, object]:
    end = next(end for end in left if end["time"] > row["time"])
    back = seconds_until_back(found, "trainer", end["time"])
    return {
        "reason": end["reason"],
        "left": end["time"] - row["time"],
        "back": None if back is None else end["time"] + back - row["time"],
    }


def trained_again(run: SlurmRun) -> int:
    steps = [record["step"] for record in jsonl.read(run.run_dir / "metrics.jsonl", "step")]
    return len(steps) - len(set(steps))


def report(options: argparse.Namespace, cluster: SlurmCluster) -> int:
    """Measures, and says what was found; the number of the audit's culprits."""
    _, beside, _ = trained(options, cluster, "alone", 0)
    run, found, rows = trained(options, cluster, "requeued", options.requeues)
    culprits, lost = audited(found.directory)
    figures: dict[str, float | None] = {
        "steps": found.steps[-1]["step"],
        "steps_alone": beside.steps[-1]["step"],
        **accuracies(found, beside),
        "submissions": run.submissions,
        "trained_again": trained_again(run),
        "audit_culprits": len(culprits),
        "responses_lost": lost,
    }
    common.finish(options, figures, rows, COLUMNS)
    return len(culprits)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.set_defaults(steps=60)
    parser.add_argument("--requeues", type=int, default=5, help="by USR1 and preemption in turn (default 5)")
    parser.add_argument("--between", type=int, default=5, help="steps before each of them (default 5)")
    parser.add_argument("--limit", type=float, default=400.0, help="the longest time without a step, seconds")
    parser.add_argument("--rollouts", type=int, default=1, choices=(1, 2), help="nodes of them (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of places where there are several")
    options = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    if options.steps <= options.requeues * (options.between + 2):
        parser.error(f"--steps={options.steps} are too few for so many requeues")
    with tempfile.TemporaryDirectory(prefix="requeues", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with SlurmCluster(Path(folder), NODES, SLURMD_TIMEOUT) as cluster:
            culprits = report(options, cluster)
    if culprits:
        raise SystemExit(f"the audit has {culprits} culprits")


if __name__ == "__main__":
    main()
