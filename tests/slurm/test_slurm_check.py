"""`laminar slurm check` in an allocation of two nodes of a real Slurm."""

import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.mark.timeout(300)
def test_two_nodes_are_looked_at_together(slurm_cluster, tmp_path: Path) -> None:
    """Promise: within a minute each node has reached the first one, compared clocks and versions, tried the
    shared folder, and passed a tensor on; nothing is left in the folder."""
    started = time.monotonic()
    command = f"{sys.executable} -m laminar_hpc.launch.cli slurm check {tmp_path}"
    job = slurm_cluster.submit("--nodes=2", "--wrap", command, OMP_NUM_THREADS="1")
    state = slurm_cluster.wait(job, 120)
    text = slurm_cluster.output(job)
    assert state == "COMPLETED", text
    assert "FAIL" not in text and time.monotonic() - started < 120
    rows = {line.split(":")[0][5:].strip() for line in text.splitlines() if line[:4] in ("ok  ", "warn")}
    assert {"nodes", "rendezvous", "clocks", "versions", "shared storage"} <= rows
    assert "gloo broadcast" in rows and "64 MiB to 2 nodes at" in text
    assert not list(tmp_path.iterdir())
