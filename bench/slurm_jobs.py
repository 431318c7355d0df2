"""A run whose roles are Slurm jobs of their own (`laminar submit --apart`), for bench/chaos.py: where they
are, their processes, and what becomes of the jobs.

The controller's job takes any node but n2, where the trainers' is; the rollouts' are on the others. The
controller's store is in its node's own memory, so that it goes with the node's power.
"""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from roles import ENGINE, below, is_engine, is_rank, steps_done
from slurm_cluster import SlurmCluster

from laminar_hpc.launch.slurm.ending import last_word
from laminar_hpc.machine.locks.lock_owner import read_owner
from laminar_hpc.machine.locks.run_lock import LOCK_FILE

JOBS = ("controller", "trainer", "rollout")
_JOB_NAMES = {"laminar-control": "controller", "laminar-trainer": "trainer", "laminar-rollouts": "rollout"}
_JOB_OF = {"relay": "rollout", ENGINE: "rollout"}  # of processes that are in another role's job
_ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "PREEMPTED", "REQUEUED")
_NO_TRAINERS = "--exclude=n2"  # else a node's power takes both
_OPTIONS = (
    "--slurm=--mem=1000 --oversubscribe --time=600",
    f"--controller=--cpus-per-task=1 {_NO_TRAINERS}",
    "--trainer=--nodelist=n2 --cpus-per-task=3",
)
END_SECONDS = 300.0
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Element:
    """A job, or an element of the rollouts' array: its id, where it is ("" while it waits), and its state."""

    job: str
    role: str
    node: str
    state: str


@dataclass
class SlurmRun:
    """`rollouts`: elements of the array, a node each. `spare`: a second controller's job, on another node."""

    cluster: SlurmCluster
    name: str
    words: Sequence[str]
    rollouts: int = 2
    spare: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    submissions: int = 0
    said: str = ""  # by the last `laminar submit`

    @property
    def run_dir(self) -> Path:
        return self.cluster.shared / self.name

    def submit(self) -> None:
        """All jobs; after the first time they go on with the run."""
        again = ["resume=auto"] if self.submissions else []
        array = f"--rollouts=--array=0-{self.rollouts - 1} --exclude=n1,n2 --cpus-per-task=3"
        output = f"--slurm=--output={self.cluster.folder}/{self.name}-%x-%A_%a.log"
        command = [
            sys.executable,
            "-m",
            "laminar_hpc.launch.cli",
            "submit",
            "--apart",
            *_OPTIONS,
            array,
            output,
        ]
        words = [f"run_dir={self.run_dir}", *self.words, *again]
        self.said = self.cluster.command(*command, *words, seconds=180, **self._settings())
        if self.spare:
            self._again("control", _NO_TRAINERS, f"{_NO_TRAINERS},n1")
        self.submissions += 1

    def add_rollouts(self, elements: str) -> None:
        """More of the array, as `0-3`."""
        self._again("rollouts", f"--array=0-{self.rollouts - 1}", f"--array={elements}")

    def _again(self, script: str, old: str, new: str) -> None:
        """The line that `laminar submit` has printed, with a change."""
        line = next(line for line in self.said.splitlines() if f"/{script}.sbatch " in line)
        self.cluster.command("sh", "-c", line.replace(old, new, 1), **self._settings())

    def _settings(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "STORE_DIR": "/dev/shm/laminar-store",
            "VENV": sys.prefix,
            **self.environment,
        }

    def elements(self, role: str | None = None) -> list[Element]:
        """The jobs that are not over, of one role or of all."""
        text = self.cluster.ask("squeue", "-h", "-r", "-o", "%i|%j|%N|%T")
        fields = [line.split("|") for line in text.splitlines()]
        found = [Element(i, _JOB_NAMES[j], node, state) for i, j, node, state in fields if j in _JOB_NAMES]
        return [each for each in found if role in (None, each.role) and each.state in _ALIVE]

    def where(self, target: str, draw: random.Random) -> Element | None:
        """A running job of this role, or with this kind of process; None between two lives."""
        role = _JOB_OF.get(target, target)
        here = sorted((e for e in self.elements(role) if e.state == "RUNNING"), key=lambda e: e.node)
        if role == "controller":
            holder = read_owner(self.run_dir / LOCK_FILE)  # not the spare
            here = [each for each in here if holder and each.node == holder[0].host]
        return draw.choice(here) if here else None

    def hears(self, element: Element) -> bool:
        """Whether its script has begun: a signal that comes before ends the job, as it would end any."""
        number = self.cluster.ask("squeue", "-h", "-j", element.job, "-o", "%A").strip()
        said = self.cluster.ask("scontrol", "-o", "show", "job", element.job).split()
        restarts = next(word.partition("=")[2] for word in said if word.startswith("Restarts="))
        role = "rollouts" if element.role == "rollout" else element.role
        return (self.run_dir / "jobs" / f"{role}.{number}.{restarts}").exists()

    def processes(self, kind: str, node: str) -> list[psutil.Process]:
        """As Roles.processes, on one node."""
        if kind == ENGINE:
            return [p for rank in self.processes("rollout", node) for p in below(rank) if is_engine(p)]
        mine = f"run_dir={self.run_dir}"
        found = {p.pid: p for p in psutil.process_iter() if is_rank(p, kind, mine) and node_of(p) == node}
        return [p for p in found.values() if p.ppid() not in found][:1]  # not what it has forked

    @property
    def is_done(self) -> bool:
        """Whether all its steps are trained."""
        return last_word(self.run_dir) == "done"

    def tend(self) -> None:
        """Submits a run that has ended again, as its user would; raises SystemExit when that is refused for
        longer than the lock of a dead controller lasts."""
        self.cluster.resume()
        if self.elements() or self.is_done:
            return
        print(f"  {self.name}: its jobs have ended; submitted again", file=sys.stderr, flush=True)
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return self.submit()
            except SystemExit:
                if time.monotonic() > until:
                    raise
            time.sleep(2.0)

    def tend_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(1.0, left))

    def until_step(self, step: int, seconds: float) -> None:
        """Raises SystemExit when it is not trained in that time: what the jobs say last is in their logs."""
        until = time.monotonic() + seconds
        while steps_done(self.run_dir) < step:
            if time.monotonic() > until:
                raise SystemExit(f"step {step} was not trained within {seconds:.0f} s: {self.elements()}")
            self.tend_for(1.0)

    def end(self) -> int:
        """`laminar stop`, then waits for the jobs. How many had to be cancelled."""
        command = [sys.executable, "-m", "laminar_hpc.launch.cli", "stop", str(self.run_dir)]
        subprocess.run(command, check=False, capture_output=True, timeout=120)
        until = time.monotonic() + END_SECONDS
        while (left := self.elements()) and time.monotonic() < until:
            time.sleep(1.0)
        if left:
            self.cluster.command("scancel", *(element.job for element in left))
        return len(left)


def node_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("SLURMD_NODENAME", "")
    except psutil.Error:
        return ""
