"""What slurm/common.sh does on a node, without Slurm."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "slurm" / "common.sh"


def bash(folder: Path, command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "-c", f". {SCRIPT}; {command}"],
        env={**os.environ, "SLURM_SUBMIT_DIR": str(folder), "RUN_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_job_that_starts_on_a_full_disk_waits_for_room(tmp_path: Path) -> None:
    """Promise (docs/architecture.md#failure-domains): a requeued job does not end because the run's folder is
    full when it starts: the others would wait for it in vain."""
    file = tmp_path / "controller.7.1"
    file.symlink_to("/dev/full")
    script = bash(tmp_path, f"with_room put {file} n1")
    assert script.stdout is not None
    assert script.stdout.readline().rstrip().endswith(f"laminar: waits for room in {tmp_path}")
    file.unlink()
    assert script.communicate(timeout=60) == ("", "") and script.returncode == 0
    assert file.read_text() == "n1\n"


STUBS = """
job="JobId=7 EndTime=Unknown JobState=RUNNING Restarts=0"
scontrol() { case "$*" in "show hostnames"*) seq -f n%g 20000 ;; *) echo "$job" ;; esac; }
squeue() { :; }
srun() { echo "srun was called"; }
"""


def test_a_signal_that_comes_before_the_script_can_hear_it_counts(tmp_path: Path) -> None:
    """Promise (docs/architecture.md#failure-domains): a job that is told of its end in its first moments does
    not die of the signal, but is requeued before it starts anything."""
    script = (SCRIPT.parent / "trainer.sbatch").read_text()
    line = next(line for line in script.splitlines() if not line.startswith("#"))
    job = f"{STUBS} export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=n1; run_job trainer"
    said, error = bash(tmp_path, f"{line}\nkill -USR1 $$\n{job}").communicate(timeout=60)
    assert "told to end (limit)" in said and "requeued, to go on from here" in said, said + error
    assert "the first is n1; run" in said, "of more names than a pipe holds"
    assert "srun was called" not in said
    firsts = [
        next(line for line in path.read_text().splitlines() if not line.startswith("#"))
        for path in SCRIPT.parent.glob("*.sbatch")
    ]
    assert firsts and all(first == line for first in firsts), firsts


def test_what_cannot_be_written_at_all_is_said(tmp_path: Path) -> None:
    """Promise: only a full disk is waited for."""
    (tmp_path / "file").write_text("")
    script = bash(tmp_path, f"with_room mkdir -p {tmp_path}/file/jobs")
    said, error = script.communicate(timeout=60)
    assert said == "" and "laminar: error: mkdir: " in error and script.returncode == 1
