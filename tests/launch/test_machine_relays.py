"""launch/machine_relays.py: jobs of a run that share a machine have one set of relays there."""

import os
import subprocess
import sys
from pathlib import Path

from laminar_hpc.launch.machine_relays import MachineRelays

OTHER = """
import sys
from laminar_hpc.launch.machine_relays import MachineRelays
MachineRelays(sys.argv[1], sys.argv[2], lambda: print("started", flush=True) or []).look()
sys.stdin.read()
"""


def test_a_job_starts_its_relays_when_the_other_one_has_ended(tmp_path: Path) -> None:
    """Promise (docs/slurm.md): of elements on one node the relays of one serve all, and when it has ended,
    also by SIGKILL, those of another one are started, once; another run does not wait for them."""
    shm_dir, started = tmp_path / "shm", list[str]()
    command = [sys.executable, "-c", OTHER, str(tmp_path / "run"), str(shm_dir)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdin
    assert other.stdout.readline() == "started\n"

    def relays(run: str) -> MachineRelays:
        return MachineRelays(str(tmp_path / run), str(shm_dir), lambda: started.append(run) or [])

    mine, apart = relays("run"), relays("another")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        mine.look()
    assert not started and len(os.listdir("/proc/self/fd")) == before
    apart.look()
    assert started == ["another"]
    other.kill()
    other.communicate()
    mine.look()
    mine.look()
    assert started == ["another", "run"]
    for each in (mine, apart):
        each.close()
    assert not list(shm_dir.iterdir())
