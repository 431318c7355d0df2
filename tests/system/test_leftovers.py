"""kill -9 of the launcher takes the whole run with it; what is left lies in shared memory until doctor or the
next start removes it."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from helpers.runs import Run
from laminar_hpc.machine.files.folders import ENGINE_FOLDER_PREFIX, OWNER_FILE
from laminar_hpc.machine.files.shared_memory import noted


def doctor(*words: str) -> list[str]:
    program = [sys.executable, "-m", "laminar_hpc.launch.cli", "doctor", *words]
    lines = subprocess.run(
        program, capture_output=True, text=True, timeout=60, check=False
    ).stdout.splitlines()
    return [line for line in lines if "left behind" in line or "removed" in line]


def left(run: Run) -> list[Path]:
    """Weight slots of the run, folders of its engines, and segments that are noted in these."""
    pids = {str(process.pid) for process in run.tree}
    engines = [
        path.parent
        for path in Path(tempfile.gettempdir()).glob(f"{ENGINE_FOLDER_PREFIX}*/{OWNER_FILE}")
        if path.read_text().split()[0] in pids
    ]
    return [*run.slots(), *engines, *(segment for folder in engines for segment in noted(folder))]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_launcher_leaves_nothing_that_doctor_does_not_find(tmp_path: Path) -> None:
    """Weight slots and an engine's folder are named with sizes, then gone; so is SGLang's own segment
    (rollout.tensor_parallel=2), which Python's resource tracker removes in most cases, but not in all."""
    run = Run(tmp_path / f"killed{os.getpid()}", "rollout.tensor_parallel=2", "steps=100")
    run.read_until("step   1/100")
    run.members()
    everything = left(run)
    assert [path for path in everything if path.name.startswith("sgl_shm")]
    run.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(run.tree, timeout=20)
    assert not alive and run.process.wait() == -signal.SIGKILL
    assert len(left(run)) >= 2
    (line,) = doctor()
    assert (
        line.startswith("warn")
        and "weight slots of" in line
        and "engine files of" in line
        and "laminar doctor --clean" in line
    )
    lines = doctor("--clean")
    assert any("weight slots" in line for line in lines) and any("engine files" in line for line in lines)
    assert not left(run) and not [path for path in everything if path.exists()]
