"""The Slurm of bench/chaos.py and its like ends with the bench, whatever that dies of."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.paths import BENCH
from laminar_hpc.machine.processes import process_is_alive

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
UP = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slurm_cluster import SlurmCluster
with SlurmCluster(Path(sys.argv[2]), 1, 30):
    print("up", flush=True)
    time.sleep(600)
"""


@contextmanager
def bench() -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A bench whose Slurm comes up in this folder."""
    folder = Path(tempfile.mkdtemp(prefix="bed", dir="/tmp"))  # short: unix sockets below it
    process = subprocess.Popen(
        [sys.executable, "-c", UP, str(BENCH), str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield folder, process
    finally:
        process.kill()
        process.wait()
        deadline = time.monotonic() + 200
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not folder.exists() and str(folder) not in Path("/proc/mounts").read_text()


@pytest.fixture
def apart(slurm_cluster) -> Path:
    """The state folder of the other tests' cluster, which shows that one can be had here."""
    if slurm_cluster.mode() != "netns":
        pytest.skip("the benches' nodes have networks of their own, which needs CAP_NET_ADMIN")
    return slurm_cluster.folder


def is_up(process: subprocess.Popen[str]) -> bool:
    return process.stdout is not None and process.stdout.readline() == "up\n"


def test_a_killed_bench_leaves_no_slurm(apart: Path) -> None:
    """Promise: children die with their parent: after SIGKILL of the bench its daemons, its nodes, its mount
    and its folder are gone."""
    with bench() as (folder, process):
        assert is_up(process)
        daemons = [int(file.read_text().split()[0]) for file in (folder / "run").glob("*.pid")]
        assert len(daemons) == 3 and all(map(process_is_alive, daemons))  # munged, slurmctld, a node
    assert not any(map(process_is_alive, daemons))


def test_several_at_once(apart: Path) -> None:
    """Promise: Slurms that start at the same moment have networks and ports of their own."""
    with bench() as (one, first), bench() as (two, second):
        assert is_up(first) and is_up(second)
        settings = [(folder / "settings").read_text() for folder in (apart, one, two)]
        for name in ("NETID", "BASE"):
            assert len({re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)[0] for text in settings}) == 3
