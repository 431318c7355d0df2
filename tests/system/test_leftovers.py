"""kill -9 of the launcher takes the whole run with it; what is left lies in shared memory until doctor or the next start removes it."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from runs import Run

from laminar_hpc.cluster.folders import ENGINE_FOLDER_PREFIX


def doctor(*words: str) -> list[str]:
    program = [sys.executable, "-m", "laminar_hpc.cli", "doctor", *words]
    lines = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    return [line for line in lines if "left behind" in line or "removed" in line]


def left() -> set[Path]:
    return {*Path("/dev/shm").iterdir(), *Path(tempfile.gettempdir()).glob(f"{ENGINE_FOLDER_PREFIX}*")}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_launcher_leaves_nothing_that_doctor_does_not_find(tmp_path: Path) -> None:
    """With rollout.tensor_parallel=2 there are weight slots, an engine's folder and SGLang's own segment: named with sizes, then gone."""
    before = left()
    run = Run(tmp_path / "run", "rollout.tensor_parallel=2", "steps=100")
    run.read_until("step   1/100")
    run.members()
    run.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(run.tree, timeout=20)
    assert not alive and run.process.wait() == -signal.SIGKILL
    names = sorted(path.name.split("-")[0].split("_mq")[0] for path in left() - before)
    assert names == ["laminar", "laminar", "sgl_shm"]
    (line,) = doctor()
    assert line.startswith("warn") and "weight slots of" in line and "engine files of" in line and "laminar doctor --clean" in line
    lines = doctor("--clean")
    assert lines[-1] == "ok    left behind: nothing" and any("weight slots" in line for line in lines)
    assert not left() - before
