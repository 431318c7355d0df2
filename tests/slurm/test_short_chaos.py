"""`make chaos` for five minutes: random faults upon a run of Slurm jobs on four nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import BENCH

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_five_minutes_of_faults(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#nothing-lost): whatever is killed, stopped, cut off, switched off or
    preempted, the run trains on, ends in order, and its audit is clean. The cluster of the other tests shows
    that one can be had here; the bench has its own."""
    if slurm_cluster.mode() != "netns":
        pytest.skip("nodes without networks of their own cannot lose a cable: that needs CAP_NET_ADMIN")
    figures = tmp_path / "chaos.json"
    words = ["--seconds", "300", "--alone-seconds", "0", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "chaos.py"), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())["figures"]
    assert found["faults"] >= 3 and found["audit_culprits"] == 0 and found["responses_lost"] == 0
    assert found["jobs_ended"] == 0
