"""A run with roles apart under random faults, against the same run left alone.

    python bench/faults.py --json faults.json                          30 minutes of faults, one every 60 s
    python bench/faults.py --seconds 300 --every 30 --kinds kill-controller,kill-trainer

    python bench/faults.py --alone-seconds 0 --kinds stop13-controller,stop60-controller,stop60-engine

Each role is started by its script in launch/, and again whenever that script ends with an error. A fault is
a role, or `engine`, and what happens to one of its processes: `kill` (SIGKILL) or `stop` (SIGSTOP for 13 s
or as many as are named, then SIGCONT). They come in shuffled rounds, each kind once a round, `--every`
seconds apart; then the run is stopped, and `laminar audit` has the last word. The run beside it, of
`--alone-seconds`, has no faults.

Figures: `effective_share` = response tokens per second trained on in the history that led to the last
weights, with faults over without. `ROLE_seconds`: the median from a kill of ROLE to the controller's next
start (controller), the next step (trainer), the next weights served (rollout), or received (relay); `back`
in the table, and after a stop from its end to the next step. `audit_culprits`: what the audit objects to;
`responses_lost`: stored, then given up. What the others did meanwhile: bench/outages.py.
Goals: 0.8, 15 s (controller), 60 s (trainer), 0 culprits, 0 lost, `rollouts_share` 0.9, `trainer_share` 1,
`groups_left` 0.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import common
import outages
import psutil
from roles import ROLES, Roles, audited, steps_done

from laminar_hpc.report import rundata
from laminar_hpc.report.rundata import Run

KINDS = tuple(f"{how}-{role}" for role in ROLES for how in ("kill", "stop"))
BACK = {"controller": "start", "trainer": "step", "rollout": "pull", "relay": "relay"}  # in metrics.jsonl
OTHERS = {
    "controller": outages.rollouts_share,
    "rollout": outages.trainer_share,
    "trainer": outages.groups_left,
}
STOPPED_SECONDS = 13.0
COLUMNS = ("fault", "after", "step", "back", "rollouts_share", "trainer_share", "groups_left")


@contextmanager
def running_roles(options: argparse.Namespace, folder: Path, name: str) -> Iterator[Roles]:
    run_dir = folder / name
    words = [f"experiment={options.experiment}", f"steps={10**6}", "checkpoint.every=5"]
    started = Roles(run_dir, [*words, "evaluation.files=[]", *options.overrides], folder / f"{name}.log")
    try:
        yield started
    finally:
        late = started.end()
        print(f"  {name}: {late} roles did not end by themselves", file=sys.stderr, flush=True)


@dataclass
class Fault:
    """`how` is kill, or stop for `seconds`; `target` a role or `engine`."""

    how: str
    seconds: float
    target: str

    @classmethod
    def read(cls, kind: str) -> "Fault":
        """Raises ValueError with what is wrong with the word."""
        found = re.fullmatch(rf"(kill|stop)(\d*)-({'|'.join((*ROLES, 'engine'))})", kind)
        if found is None or (found[1] == "kill" and found[2]):
            raise ValueError(f"{kind} is none of kill-ROLE, stop-ROLE, stopSECONDS-ROLE; ROLE may be engine")
        return cls(found[1], float(found[2] or STOPPED_SECONDS), found[3])

    def strike(self, running: Roles) -> bool:
        """Returns when a stop is over; False when there is nobody to be struck at the moment."""
        struck = running.processes(self.target)
        for process in struck:
            with suppress(psutil.NoSuchProcess):
                process.kill() if self.how == "kill" else process.suspend()
        if struck and self.how == "stop":
            running.tend_for(self.seconds)
            for process in struck:
                with suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
                    process.resume()
        return bool(struck)


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


def faulty(options: argparse.Namespace, folder: Path) -> tuple[float, list[dict], int, int]:
    """Tokens per second, the faults, how many the audit's culprits are, and the responses lost."""
    draw, rows, round_of = random.Random(options.seed), [], list[str]()
    with running_roles(options, folder, "faults") as running:
        running.until_it_trains()
        start = time.time()
        while time.time() - start < options.seconds:
            running.tend_for(options.every)
            round_of = round_of or draw.sample(options.kinds, len(options.kinds))
            moment = time.time()
            if Fault.read(round_of[-1]).strike(running):
                step = steps_done(running.run_dir)
                rows.append({"fault": round_of.pop(), "time": moment, "after": moment - start, "step": step})
                print(f"  {rows[-1]['after']:6.0f} s  {rows[-1]['fault']}", file=sys.stderr, flush=True)
        running.tend_for(options.every)
        end = time.time()
    run = rundata.load(folder / "faults")
    for row in rows:
        row |= aftermath(run, Fault.read(row["fault"]), row["time"])
    culprits, lost = audited(folder / "faults")
    return tokens_per_second(run, start, end), rows, len(culprits), lost


def aftermath(run: Run, fault: Fault, moment: float) -> dict[str, float | None]:
    if fault.how == "stop":
        return {"back": seconds_until_back(run, "trainer", moment + fault.seconds)}
    back = seconds_until_back(run, fault.target, moment) if fault.target in BACK else None
    if back is None or fault.target not in OTHERS:
        return {"back": back}
    until = moment + back
    if fault.target == "trainer":  # which may have gone back to a checkpoint, and publish its weights
        until = min((r["time"] for r in run.records.get("publish", []) if r["time"] > moment), default=until)
    return {"back": back, OTHERS[fault.target].__name__: OTHERS[fault.target](run, moment, until)}


def alone(options: argparse.Namespace, folder: Path) -> float | None:
    """Tokens per second without faults."""
    if not options.alone_seconds:
        return None
    with running_roles(options, folder, "alone") as running:
        running.until_it_trains()
        start = time.time()
        running.tend_for(options.alone_seconds)
        end = time.time()
    return tokens_per_second(rundata.load(folder / "alone"), start, end)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=1800.0, help="under faults (default 1800)")
    parser.add_argument("--alone-seconds", type=float, default=300.0, help="without (default 300; 0: never)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between faults (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults")
    parser.add_argument(
        "--kinds", type=common.words(Fault.read), default=list(KINDS), help=f"default {','.join(KINDS)}"
    )
    options = parser.parse_args()
    with common.run_folder(options) as folder:
        without = alone(options, folder)
        under, rows, culprits, lost = faulty(options, folder)
    figures: dict[str, float | None] = {
        "effective_share": under / without if without else None,
        "tokens_per_second": under,
        "tokens_per_second_alone": without,
        "faults": len(rows),
        "audit_culprits": culprits,
        "responses_lost": lost,
    }
    for role in ROLES:
        figures[f"{role}_seconds"] = common.median([r["back"] for r in rows if r["fault"] == f"kill-{role}"])
    for name in ("rollouts_share", "trainer_share"):
        figures[name] = common.median([row[name] for row in rows if row.get(name) is not None])
    figures["groups_left"] = max(
        (row["groups_left"] or 0 for row in rows if "groups_left" in row), default=None
    )
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
