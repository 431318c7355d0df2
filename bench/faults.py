"""A run with a torchrun per role under random faults, against the same run left alone.

    python bench/faults.py --json faults.json                          30 minutes of faults, one every 60 s
    python bench/faults.py --seconds 300 --every 30 --kinds kill-controller,kill-trainer

Each role is started by its script in launch/, and again whenever that script ends with an error. A fault is
a role and what happens to one of its ranks: `kill` (SIGKILL) or `stop` (SIGSTOP for 13 s, then SIGCONT).
They come in shuffled rounds, each kind once a round, `--every` seconds apart; then the run is stopped, and
`laminar audit` has the last word. The run beside it, of `--alone-seconds`, has no faults.

Figures: `effective_share` = response tokens per second trained on in the history that led to the last
weights, with faults over without. `ROLE_seconds`: the median from a kill of ROLE to the controller's next
start (controller), the next step (trainer), the next weights served (rollout), or received (relay).
`audit_culprits`: what the audit objects to. Goals: 0.8, 15 s (controller), 60 s (trainer), and 0 culprits.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import common
import psutil

from laminar_hpc.audit.checks import audit
from laminar_hpc.audit.records import read
from laminar_hpc.observability import jsonl
from laminar_hpc.report import rundata
from laminar_hpc.report.rundata import Run

ROLES = ("controller", "relay", "rollout", "trainer")
KINDS = tuple(f"{how}-{role}" for role in ROLES for how in ("kill", "stop"))
BACK = {"controller": "start", "trainer": "step", "rollout": "pull", "relay": "relay"}  # in metrics.jsonl
STOPPED_SECONDS = 13.0
COLUMNS = ("fault", "after", "step", "back")


@dataclass
class Roles:
    """The scripts of all roles of one run; whichever ends with an error is started again."""

    run_dir: Path
    words: list[str]
    log: Path
    scripts: dict[str, subprocess.Popen] = field(default_factory=dict)
    starts: int = 0

    def tend(self) -> None:
        for role in ROLES:
            script = self.scripts.get(role)
            if script is None or script.poll() not in (None, 0):
                self.starts += 1
                resume = ["resume=auto"] if script is not None and role == "controller" else []
                with open(self.log, "ab") as log:
                    command = [common.ROOT / f"launch/{role}.sh", self.run_dir, *self.words, *resume]
                    self.scripts[role] = subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        env={"OMP_NUM_THREADS": "1", **os.environ},
                    )

    def rank(self, role: str) -> psutil.Process | None:
        """A rank of `role` that runs, not its torchrun; None between two lives."""
        for child in psutil.Process(self.scripts[role].pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if f"role={role}" in words and "torch.distributed.run" not in words:
                return child
        return None

    def end(self) -> int:
        """Asks the run to stop, then waits for its roles. How many had to be ended."""
        command = [sys.executable, "-m", "laminar_hpc.cli", "stop", str(self.run_dir)]
        subprocess.run(command, check=False, capture_output=True, timeout=60)
        until, late = time.monotonic() + 120, 0
        for script in self.scripts.values():
            try:
                script.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late += 1
                common.end(script)
        return late


@contextmanager
def roles(options: argparse.Namespace, folder: Path, name: str) -> Iterator[Roles]:
    run_dir = folder / name
    words = [f"experiment={options.experiment}", f"steps={10**6}", "checkpoint.every=5"]
    started = Roles(run_dir, [*words, "evaluation.files=[]", *options.overrides], folder / f"{name}.log")
    try:
        yield started
    finally:
        late = started.end()
        print(f"  {name}: {late} roles did not end by themselves", file=sys.stderr, flush=True)


def steps_done(run_dir: Path) -> int:
    return max((record["step"] for record in jsonl.read(run_dir / "metrics.jsonl", "step")), default=0)


def until_it_trains(running: Roles, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while steps_done(running.run_dir) < 2:
        if time.monotonic() > until:
            raise SystemExit(f"no two steps within {seconds:.0f} s; see {running.log}")
        running.tend()
        time.sleep(0.5)


def tend_for(running: Roles, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        running.tend()
        time.sleep(min(0.2, left))


def hit(running: Roles, kind: str) -> bool:
    """One fault; False when no such rank runs at the moment."""
    how, role = kind.split("-")
    rank = running.rank(role)
    if rank is None:
        return False
    if how == "kill":
        rank.kill()
        return True
    rank.suspend()
    tend_for(running, STOPPED_SECONDS)
    with suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
        rank.resume()
    return True


def tokens_per_second(run: Run, start: float, end: float) -> float:
    return sum(step["response_tokens"] for step in run.steps if start < step["time"] <= end) / (end - start)


def seconds_until_back(run: Run, role: str, time_of_fault: float) -> float | None:
    """From a kill to the next sign of that role in the metrics."""
    kind = BACK[role]
    if kind == "start":
        times = [launch.start for launch in run.launches]
    elif kind == "step":
        times = [step["time"] for launch in run.launches for step in launch.steps]
    else:
        times = [record["time"] for record in run.records.get(kind, [])]
    return min((moment - time_of_fault for moment in times if moment > time_of_fault), default=None)


def faulty(options: argparse.Namespace, folder: Path) -> tuple[float, list[dict], int]:
    """Tokens per second, the faults, and the audit's culprits."""
    draw, rows, round_of = random.Random(options.seed), [], list[str]()
    with roles(options, folder, "faults") as running:
        until_it_trains(running)
        start = time.time()
        while time.time() - start < options.seconds:
            tend_for(running, options.every)
            round_of = round_of or draw.sample(options.kinds, len(options.kinds))
            moment = time.time()
            if hit(running, round_of[-1]):
                step = steps_done(running.run_dir)
                rows.append({"fault": round_of.pop(), "time": moment, "after": moment - start, "step": step})
                print(f"  {rows[-1]['after']:6.0f} s  {rows[-1]['fault']}", file=sys.stderr, flush=True)
        tend_for(running, options.every)
        end = time.time()
    run = rundata.load(folder / "faults")
    for row in rows:
        how, role = row["fault"].split("-")
        row["back"] = seconds_until_back(run, role, row["time"]) if how == "kill" else None
    with read(folder / "faults") as records:
        culprits = [text for finding in audit(records) for text in finding.culprits]
    for culprit in culprits:
        print(f"  audit: {culprit}", file=sys.stderr, flush=True)
    return tokens_per_second(run, start, end), rows, len(culprits)


def alone(options: argparse.Namespace, folder: Path) -> float:
    """Tokens per second without faults."""
    with roles(options, folder, "alone") as running:
        until_it_trains(running)
        start = time.time()
        tend_for(running, options.alone_seconds)
        end = time.time()
    return tokens_per_second(rundata.load(folder / "alone"), start, end)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=1800.0, help="under faults (default 1800)")
    parser.add_argument("--alone-seconds", type=float, default=300.0, help="without (default 300)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between faults (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(KINDS), help=f"of {','.join(KINDS)}"
    )
    options = parser.parse_args()
    with common.run_folder(options) as folder:
        without = alone(options, folder)
        under, rows, culprits = faulty(options, folder)
    figures: dict[str, float | None] = {
        "effective_share": under / without,
        "tokens_per_second": under,
        "tokens_per_second_alone": without,
        "faults": len(rows),
        "audit_culprits": culprits,
    }
    for role in ROLES:
        figures[f"{role}_seconds"] = common.median([r["back"] for r in rows if r["fault"] == f"kill-{role}"])
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
