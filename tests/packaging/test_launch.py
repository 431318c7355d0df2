"""launch/: a torchrun per role, started and stopped together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = ("controller", "trainer", "relay", "rollout", "all_roles")


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_arguments_each_script_says_how_it_is_used(name: str) -> None:
    """Exit code 2 and the script's own description."""
    done = subprocess.run([REPOSITORY / f"launch/{name}.sh"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2 and done.stdout.startswith(f"launch/{name}.sh RUN_DIR [overrides]")


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.Popen([REPOSITORY / "launch/all_roles.sh", run_dir, "experiment=demo", *overrides], cwd=REPOSITORY, env=environment)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_torchruns_make_one_run(tmp_path: Path) -> None:
    """The roles find each other without a common rendezvous, train all steps, and every torchrun exits with 0."""
    launched = start(tmp_path / "run", "steps=2")
    assert launched.wait(300) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 2 and summary["max_versions_per_trajectory"] == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_term_stops_the_run_in_order(tmp_path: Path) -> None:
    """TERM to the script becomes a stop message: a checkpoint is written, and the exit code is 0."""
    launched = start(tmp_path / "run", "steps=1000")
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and '"kind":"step"' in metrics.read_text()):
        assert launched.poll() is None and time.monotonic() < deadline, "no step was trained within 240 s"
        time.sleep(0.5)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(120) == 0
    assert list((tmp_path / "run").rglob("checkpoint*"))
