"""The Slurm of bench/chaos.py and its like ends with the bench, whatever that dies of."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from laminar_hpc.cluster.processes import process_is_alive

BENCH = Path(__file__).resolve().parents[2] / "bench"
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


def test_a_killed_bench_leaves_no_slurm(slurm_cluster) -> None:
    """Promise: children die with their parent: after SIGKILL of the bench its daemons, its nodes, its mount
    and its folder are gone. The cluster of the other tests shows that one can be had here."""
    if slurm_cluster.mode() != "netns":
        pytest.skip("the benches' nodes have networks of their own, which needs CAP_NET_ADMIN")
    folder = Path(tempfile.mkdtemp(prefix="bed", dir="/tmp"))  # short: unix sockets below it
    bench = subprocess.Popen(
        [sys.executable, "-c", UP, str(BENCH), str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert bench.stdout is not None and bench.stdout.readline() == "up\n"
        daemons = [int(file.read_text().split()[0]) for file in (folder / "run").glob("*.pid")]
        assert len(daemons) == 3 and all(map(process_is_alive, daemons))  # munged, slurmctld, a node
    finally:
        bench.kill()
        bench.wait()
    deadline = time.monotonic() + 200
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists() and str(folder) not in Path("/proc/mounts").read_text()
    assert not any(map(process_is_alive, daemons))
