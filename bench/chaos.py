"""Random faults upon a run of Slurm jobs, one for each role, on four nodes; then `laminar audit`.

    make chaos                                                   30 minutes of faults; needs root
    python bench/chaos.py --seconds 300 --every 20 --json chaos.json
    python bench/chaos.py --kinds power-rollout --faults 1 --alone-seconds 0

The nodes are those of a real Slurm on this machine (bench/slurm_cluster.py), the jobs those of
`laminar submit --apart`: a controller, the trainers, and an array of rollouts of `--rollouts` elements.
Faults come in shuffled rounds, each kind once a round, after pauses of half to one and a half times `--every`
seconds, whatever the run has made of the last one; --seed gives the same kinds, places and pauses. What each
kind does, and what cannot be had on one machine: bench/chaos_faults.py. The run beside it has no faults.

A run whose jobs have all ended is submitted again, as its user would (`submissions`). `jobs_ended`: those
that are over though the run is not, a while after the last fault.
The bench fails when no step is trained for `--limit` seconds, or the audit objects. One that fails or is
ended (Ctrl-C, TERM) prints the faults so far; its Slurm ends with it, whatever it dies of.

Figures: `effective_share` = steps per second in the history that led to the last weights, with faults over
without. Responses, and with them steps, grow while the policy learns, so that without is the mean of two
policies, each for `--alone-seconds`: of a young one in the run without faults (`steps_per_second_before`),
and of an old one in the run with faults once they are over (`_after`). `tokens_per_second`: response tokens
trained on. `accuracy`: of the trained batches, the mean of the ten steps up to `accuracy_step`, which both
runs have; beside it that of the run without faults. `audit_culprits`, `responses_lost` (stored, then given
up). Columns: `over`, how long the fault lasted; `noticed`, when Slurm knew of it; `back`, from a death to
the next step, controller or replica of that role, from the end of another fault to the next step; of a
power cut of the trainers from their node's return. `published`: from the beginning of a fault to the end of
the next publication that began after it. `joins`: of members until the next fault, of which `new` are new
processes; the others were taken for dead. `trainer_share`: seconds per trained token until the lost replica
is back, over those before. `load`: of the machine.
Goals: 0.8, 0 culprits, 0 lost, 0 ended.
"""

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import common
import outages
from chaos_faults import KINDS, Fault, environment, what_lacks
from faults import BACK, seconds_until_back, tokens_per_second
from roles import audited, steps_done
from slurm_cluster import SlurmCluster, missing
from slurm_jobs import SlurmRun

from laminar_hpc.report import rundata
from laminar_hpc.report.rundata import Run

COLUMNS = (
    *("fault", "node", "after", "step", "over", "noticed", "back", "published"),
    *("joins", "new", "trainer_share", "load"),
)
NODES = 4
STEPS = 10  # over which an accuracy is the mean
START_SECONDS = 400.0  # from a submission to the second step, on two busy cores


def sequence(kinds: Sequence[str], seed: int, every: float) -> Iterator[tuple[float, str, int]]:
    """Without end: the pause before a fault in seconds, its kind, and a seed for where it strikes."""
    draw = random.Random(seed)
    while True:
        for kind in draw.sample(kinds, len(kinds)):
            yield every * draw.uniform(0.5, 1.5), kind, draw.randrange(2**32)


@contextmanager
def running(options: argparse.Namespace, cluster: SlurmCluster, name: str) -> Iterator[SlurmRun]:
    words = [f"experiment={options.experiment}", f"steps={10**6}", "checkpoint.every=5"]
    words += ["evaluation.files=[]", *options.overrides]
    run = SlurmRun(cluster, name, words, options.rollouts, options.spare, environment())
    try:
        run.submit()
        run.until_step(2, START_SECONDS)
        Watch(run, options.limit).tend_for(options.calm)  # until all replicas are there
        yield run
    finally:
        if not isinstance(sys.exception(), KeyboardInterrupt):  # else the jobs end with their Slurm
            late = run.end()
            print(f"  {name}: {late} jobs did not end by themselves", file=sys.stderr, flush=True)


class Watch:
    """Notices a run that hangs."""

    def __init__(self, run: SlurmRun, limit: float) -> None:
        self._run, self._limit, self._step, self._since = run, limit, -1, time.monotonic()

    def look(self) -> None:
        """Raises SystemExit when no step was trained for the limit."""
        step = steps_done(self._run.run_dir)
        if step != self._step:
            self._step, self._since = step, time.monotonic()
        if (stood := time.monotonic() - self._since) > self._limit:
            raise SystemExit(f"no step after step {step} for {stood:.0f} s: {self._run.elements()}")

    def tend_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._run.tend_for(min(1.0, left))
            self.look()

    def until(self, what: Callable[[], bool]) -> None:
        while not what():
            self.tend_for(1.0)

    def until_struck(self, kind: str, seed: int) -> dict:
        """Strikes as soon as there is somebody to be struck; the row of it."""
        fault = Fault.read(kind)
        while True:
            begun, step = time.time(), steps_done(self._run.run_dir)
            if (found := fault.strike(self._run, random.Random(seed))) is not None:
                return {"fault": kind, "time": begun, "step": step, "load": os.getloadavg()[0], **found}
            self.tend_for(1.0)


@contextmanager
def said_at_a_stop(run: SlurmRun, rows: list[dict]) -> Iterator[None]:
    """The faults so far, of a bench that stops before its end."""
    try:
        yield
    except BaseException:
        found = rundata.load(run.run_dir)
        print(common.table([row | aftermath(found, row) for row in rows], COLUMNS), flush=True)
        raise


def members(run: SlurmRun) -> tuple[int, int]:
    """How often members have joined so far, and how many processes these were."""
    log = run.run_dir / "logs" / "controller0.log"
    pids = (
        re.findall(r" joined \(pid (\S+ on \S+)\)", log.read_text(errors="replace")) if log.exists() else []
    )
    return len(pids), len(set(pids))


def faulty(
    options: argparse.Namespace, cluster: SlurmCluster
) -> tuple[list[dict], list[float], dict[str, int]]:
    """The faults; when they began, when they were over, and when the time without faults after them was; the
    figures of the jobs."""
    rows: list[dict] = []
    with running(options, cluster, "faults") as run, said_at_a_stop(run, rows):
        watch, start, jobs = Watch(run, options.limit), time.time(), len(run.elements())
        for pause, kind, seed in sequence(options.kinds, options.seed, options.every):
            watch.tend_for(pause)
            if len(rows) == options.faults or time.time() - start > options.seconds:
                break
            before = members(run)
            rows.append({"before": before, **watch.until_struck(kind, seed)})
            rows[-1]["after"] = rows[-1]["time"] - start
            print(f"  {rows[-1]['after']:6.0f} s  {kind}  {rows[-1]['node']}", file=sys.stderr, flush=True)
        watch.tend_for(options.calm)
        moments = [start, time.time()]
        run.until_step(steps_done(run.run_dir) + 1, options.limit)
        watch.tend_for(options.alone_seconds)
        moments.append(time.time())
        of_jobs = {"submissions": run.submissions, "jobs_ended": jobs - len(run.elements())}
        counts = [*(row.pop("before") for row in rows), members(run)]
        for row, (joined, were), (joins, are) in zip(rows, counts, counts[1:], strict=False):
            row |= {"joins": joins - joined, "new": are - were}
    return rows, moments, of_jobs


def pace(run: Run, start: float, end: float) -> tuple[float, float]:
    """Steps per second, and response tokens per second."""
    steps = sum(start < step["time"] <= end for step in run.steps)
    return steps / (end - start), tokens_per_second(run, start, end)


def alone(options: argparse.Namespace, cluster: SlurmCluster) -> tuple[Run, tuple[float, float]] | None:
    """The run without faults, and its pace."""
    if not options.alone_seconds:
        return None
    with running(options, cluster, "alone") as run:
        start = time.time()
        Watch(run, options.limit).tend_for(options.alone_seconds)
        end = time.time()
    found = rundata.load(run.run_dir)
    return found, pace(found, start, end)


def aftermath(run: Run, row: dict) -> dict[str, float | None]:
    fault, begun, over = Fault.read(row["fault"]), row["time"], row["time"] + row["over"]
    publications = run.records.get("publish", [])
    published = (each["time"] - begun for each in publications if each["time"] - each["seconds"] > begun)
    found: dict[str, float | None] = {"published": min(published, default=None)}
    if fault.how == "kill" and fault.target in BACK:
        return found | {"back": seconds_until_back(run, fault.target, begun)}
    ends_a_job = fault.how in ("power", "usr1", "preempt")
    if ends_a_job and fault.target == "rollout":
        if back := newcomer(run, begun):
            found["trainer_share"] = outages.trainer_share(run, begun, begun + back)
        return found | {"back": back}
    if fault.how == "power":
        return found | {
            "back": seconds_until_back(run, fault.target, over if fault.target == "trainer" else begun)
        }
    if ends_a_job and fault.target == "trainer":  # after the step under way
        ends = (end["time"] for end in run.records.get("gang_ended", []) if end["time"] > begun)
        if (left := min(ends, default=None)) is None:
            return found | {"back": None}
        back = seconds_until_back(run, "trainer", left)
        return found | {"back": None if back is None else left - begun + back}
    if ends_a_job:  # all jobs end and start again, or a spare takes over
        if (again := seconds_until_back(run, "controller", begun)) is None:
            return found | {"back": None}
        back = seconds_until_back(run, "trainer", begun + again)
        return found | {"back": None if back is None else again + back}
    return found | {"back": seconds_until_back(run, "trainer", over)}


def newcomer(run: Run, moment: float) -> float | None:
    """From this moment until a replica that was not there before serves weights."""
    pulls = run.records.get("pull", [])
    before = {pull["replica"] for pull in pulls if pull["time"] <= moment}
    later = (p["time"] - moment for p in pulls if p["time"] > moment and p["replica"] not in before)
    return min(later, default=None)


def accuracies(run: Run, beside: Run | None) -> dict[str, float | None]:
    of = {step["step"]: step["accuracy_mean"] for step in run.steps}
    other = {step["step"]: step["accuracy_mean"] for step in beside.steps} if beside else {}
    last = min(max(of, default=0), max(other, default=10**9))
    taken = range(max(1, last - STEPS + 1), last + 1)

    def mean(values: dict[int, float]) -> float | None:
        return statistics.fmean(found) if (found := [values[s] for s in taken if s in values]) else None

    return {"accuracy": mean(of), "accuracy_alone": mean(other), "accuracy_step": last}


def options_of() -> argparse.Namespace:
    parser = common.parser(__doc__ or "")
    for name, default, about in (
        ("--seconds", 1800.0, "under faults"),
        ("--alone-seconds", 300.0, "without; 0: never"),
        ("--every", 20.0, "seconds between faults"),
        ("--calm", 60.0, "seconds without faults, of a run that has just begun and after the last fault"),
        ("--limit", 400.0, "the longest time without a step"),
        ("--faults", 10**6, "at most"),
        ("--seed", 0, "of kinds, places and pauses"),
        ("--slurmd-timeout", 60, "seconds until Slurm takes a node for dead"),
    ):
        parser.add_argument(name, type=type(default), default=default, help=f"{about} (default {default})")
    parser.add_argument(
        "--kinds",
        type=common.words(Fault.read),
        default=list(KINDS),
        help="default: all that can be had here",
    )
    parser.add_argument("--rollouts", type=int, default=2, choices=(1, 2), help="nodes of them (default 2)")
    parser.add_argument("--spare", action="store_true", help="with a spare controller (docs/slurm.md)")
    options = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    for kind in options.kinds:
        if lack := what_lacks(kind):
            print(f"left out: {kind}: {lack}", file=sys.stderr)
    options.kinds = [kind for kind in options.kinds if not what_lacks(kind)]
    if not options.kinds:
        parser.error("no kind of fault is left")
    return options


def report(options: argparse.Namespace, cluster: SlurmCluster) -> int:
    """Measures, and says what was found; the number of the audit's culprits."""
    beside = alone(options, cluster)
    rows, (start, over, end), of_jobs = faulty(options, cluster)
    run = rundata.load(cluster.shared / "faults")
    rows = [row | aftermath(run, row) for row in rows]
    culprits, lost = audited(run.directory)
    under = pace(run, start, over)
    alone_run, before = beside or (None, (None, None))
    after = pace(run, over, end) if beside else (None, None)
    figures: dict[str, float | None] = {
        "effective_share": under[0] / statistics.fmean([before[0], after[0]]) if beside else None,
        "steps_per_second": under[0],
        "steps_per_second_before": before[0],
        "steps_per_second_after": after[0],
        "tokens_per_second": under[1],
        "tokens_per_second_before": before[1],
        "tokens_per_second_after": after[1],
        "faults": len(rows),
        "steps": run.steps[-1]["step"] if run.steps else 0,
        **accuracies(run, alone_run),
        **of_jobs,
        "audit_culprits": len(culprits),
        "responses_lost": lost,
    }
    common.finish(options, figures, rows, COLUMNS)
    return len(culprits)


def keep(options: argparse.Namespace, cluster: SlurmCluster) -> None:
    """The runs and the jobs' logs, for --runs-dir."""
    if options.runs_dir:
        for path in [*cluster.shared.iterdir(), *cluster.folder.glob("*.log"), cluster.folder / "log"]:
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, options.runs_dir / path.name)


def main() -> None:
    options = options_of()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.runs_dir:
        options.runs_dir.mkdir(parents=True, exist_ok=True)
        if any(options.runs_dir.iterdir()):
            raise SystemExit(f"--runs-dir: {options.runs_dir} is not empty: name another one, or remove it")
    folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))  # short: Slurm has unix sockets below it
    try:
        with SlurmCluster(folder, NODES, options.slurmd_timeout) as cluster:
            try:
                culprits = report(options, cluster)
            finally:
                keep(options, cluster)
    except KeyboardInterrupt:
        raise SystemExit("ended before its time") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if culprits:
        raise SystemExit(f"the audit has {culprits} culprits")


if __name__ == "__main__":
    main()
