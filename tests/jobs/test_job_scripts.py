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


def test_what_cannot_be_written_at_all_is_said(tmp_path: Path) -> None:
    """Promise: only a full disk is waited for."""
    (tmp_path / "file").write_text("")
    script = bash(tmp_path, f"with_room mkdir -p {tmp_path}/file/jobs")
    said, error = script.communicate(timeout=60)
    assert said == "" and "laminar: error: mkdir: " in error and script.returncode == 1
