"""A real Slurm of two or three nodes for the tests of this folder, by the three scripts beside this file.

It needs root and, where Slurm is not installed, apt-get. On a machine without them the tests are skipped and
say why; with CI=true in the environment they fail instead, so that CI never passes by leaving them out.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.paths import ROOT

HERE = Path(__file__).parent
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
}


class SlurmCluster:
    """A running Slurm with nodes n1, n2, ... `folder` is its state folder; a job's output is in
    folder/JOB.out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "etc/slurm.conf")}

    def command(self, *words: str, seconds: float = 20, **environment: str) -> str:
        """The standard output of a Slurm command; raises CalledProcessError with its words when it fails."""
        done = subprocess.run(
            words,
            env={**self.environment, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, (
            f"{' '.join(words)}: exit code {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done.stdout

    def submit(self, *words: str, **environment: str) -> str:
        """Submits `sbatch WORDS` from the repository's root and returns the job id."""
        return self.command(
            "sbatch", "--parsable", f"--output={self.folder}/%j.out", *words, **environment
        ).strip()

    def output(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: str) -> str:
        """The job's state as `scontrol show job` gives it, for example RUNNING or COMPLETED."""
        words = self.command("scontrol", "-o", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def wait(self, job: str, seconds: float) -> str:
        """Waits for the end of a job and returns its last state; fails with the tail of its output when that
        takes longer."""
        return self.poll(
            lambda: state if (state := self.state(job)) in ENDED else "",
            seconds,
            f"the end of job {job}",
            job,
        )

    def poll(self, condition, seconds: float, what: str, job: str = ""):
        """Waits until `condition()` is true and returns its value; fails after `seconds`, naming what was
        awaited."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(
                    f"waited {seconds:.0f} s for {what}; output of the job: "
                    f"{self.output(job)[-3000:] if job else 'none'}"
                )
            time.sleep(0.2)
        return value

    def node(self, verb: str, name: str) -> None:
        """off | on | crash | restart | cut | mend a node; see slurm_node.sh."""
        self.command(str(HERE / "slurm_node.sh"), str(self.folder), verb, name, seconds=60)

    def mode(self) -> str:
        """netns, shared or plain: how far the nodes are apart."""
        settings = (self.folder / "settings").read_text().splitlines()
        return next(line.partition("=")[2] for line in settings if line.startswith("MODE="))


def _obstacle() -> str:
    """Why no Slurm can be started here, empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the Slurm tests start a Slurm and so need root on Linux"
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    if not shutil.which("slurmctld", path=path) and not shutil.which("apt-get"):
        return "the Slurm tests need Slurm's daemons or apt-get to install them"
    return ""


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[SlurmCluster]:
    """Of four declared CPUs; Debian's Slurm packages are installed first where they are missing."""
    with _cluster("--gpus", "0") as cluster:
        yield cluster


@pytest.fixture
def slurm_cluster(two_nodes: SlurmCluster) -> Iterator[SlurmCluster]:
    """Two nodes without jobs: those of a test that has failed end with it."""
    yield two_nodes
    if two_nodes.command("squeue", "-h"):
        two_nodes.command("scancel", "--full", "--user=root")
        two_nodes.poll(lambda: not two_nodes.command("squeue", "-h"), 120, "the end of cancelled jobs")


@pytest.fixture
def three_nodes() -> Iterator[SlurmCluster]:
    """One for each component of a heterogeneous job."""
    with _cluster("--gpus", "0", nodes=3) as cluster:
        yield cluster


@contextmanager
def _cluster(*options: str, nodes: int = 2) -> Iterator[SlurmCluster]:
    if obstacle := _obstacle():
        if os.environ.get("CI"):
            pytest.fail(obstacle)
        pytest.skip(obstacle)
    folder = Path(
        tempfile.mkdtemp(prefix="slurm", dir="/tmp")
    )  # short: unix sockets below it must fit in 108 bytes
    command = [str(HERE / "slurm_up.sh"), str(folder), "--nodes", str(nodes), "--cpus", "4", *options]
    try:
        # a file takes its output: the daemons it starts inherit the descriptors, and a pipe would never close
        with open(folder / "up.log", "w") as log:
            done = subprocess.run(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=240, check=False
            )
        assert done.returncode == 0, (folder / "up.log").read_text()
        yield SlurmCluster(folder)
    finally:
        subprocess.run(
            [str(HERE / "slurm_down.sh"), str(folder), "--wipe"],
            stdout=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
