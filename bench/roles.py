"""A run with roles apart, for the benches of faults: its scripts in launch/, which are started again
whenever one ends with an error, and its ranks, which can be killed and stopped."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import common
import psutil

from laminar_hpc.machine.files import jsonl
from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read

ROLES = ("controller", "relay", "rollout", "trainer")
ENGINE = "engine"  # of a rollout: processes of SGLang


@dataclass
class Roles:
    """`inside`: by role, the words of a command before which its script's are put."""

    run_dir: Path
    words: Sequence[str]
    log: Path
    inside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scripts: dict[str, subprocess.Popen] = field(default_factory=dict)
    starts: int = 0

    def tend(self) -> None:
        for role in ROLES:
            script = self.scripts.get(role)
            if script is None or script.poll() not in (None, 0):
                self.starts += 1
                resume = ["resume=auto"] if role == "controller" else []
                command = [*self._inside(role), common.ROOT / f"launch/{role}.sh", self.run_dir]
                with open(self.log, "ab") as log:
                    self.scripts[role] = subprocess.Popen(
                        [*command, *self.words, *resume],
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        env={"OMP_NUM_THREADS": "1", **os.environ},
                    )

    def tend_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.tend()
            time.sleep(min(0.2, left))

    def until_it_trains(self, seconds: float = 300.0) -> None:
        until = time.monotonic() + seconds
        while steps_done(self.run_dir) < 2:
            if time.monotonic() > until:
                raise SystemExit(f"no two steps within {seconds:.0f} s; see {self.log}")
            self.tend()
            time.sleep(0.5)

    def processes(self, kind: str) -> list[psutil.Process]:
        """The rank of this role, not its agent, or of the kind `engine` all that belong to the engine;
        none between two lives."""
        if kind == ENGINE:
            return [p for rank in self.processes("rollout") for p in below(rank) if is_engine(p)]
        ranks = [p for p in below(psutil.Process(self.scripts[kind].pid)) if is_rank(p, kind)]
        return ranks[:1]

    def _inside(self, role: str) -> Sequence[str]:
        return self.inside.get(role, ())

    def end(self) -> int:
        """Asks the run to stop, then waits for its roles. How many had to be ended."""
        command = [sys.executable, "-m", "laminar_hpc.launch.cli", "stop", str(self.run_dir)]
        command = [*self._inside("controller"), *command]
        subprocess.run(command, check=False, capture_output=True, timeout=60)
        until, late = time.monotonic() + 120, 0
        for script in self.scripts.values():
            try:
                script.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late += 1
                common.end(script)
        return late


def customize_roles(folder: str) -> None:
    """Processes that are started from here on import the sitecustomize.py of this folder of bench/."""
    own = [word] if (word := os.environ.get("PYTHONPATH")) else []
    folders = [str(common.ROOT / "bench" / name) for name in (folder, "hooks")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *own])


def steps_done(run_dir: Path) -> int:
    return max((record["step"] for record in jsonl.read(run_dir / "metrics.jsonl", "step")), default=0)


def below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_rank(process: psutil.Process, role: str, *others: str) -> bool:
    """`others`: words that it was started with as well."""
    words = words_of(process)
    return all(word in words for word in (f"role={role}", *others)) and "torch.distributed.run" not in words


def is_engine(process: psutil.Process) -> bool:
    return any("sglang" in word for word in words_of(process))


def audited(run_dir: Path) -> tuple[list[str], int]:
    """The audit's culprits, each said, and how many responses were stored and then given up."""
    with read(run_dir) as records:
        culprits = [text for finding in audit(records) for text in finding.culprits]
        store = records.store
        lost = sum(t.state == "given_up" and bool(t.digest) for t in store.trajectories) if store else 0
    for culprit in culprits:
        print(f"  audit: {culprit}", file=sys.stderr, flush=True)
    return culprits, lost
