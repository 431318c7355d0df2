"""launch/: an agent per role, or one for all of them, started and stopped together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.paths import ROOT
from laminar_hpc.line.address import read_address

SCRIPTS = ("controller", "trainer", "relay", "rollout", "all_roles")


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_arguments_each_script_says_how_it_is_used(name: str) -> None:
    """Exit code 2 and the script's own description."""
    done = subprocess.run(
        [ROOT / f"launch/{name}.sh"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2 and done.stdout.startswith(f"launch/{name}.sh RUN_DIR [overrides]")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_setting_in_place_of_the_run_s_folder_is_refused(name: str) -> None:
    """One line and exit code 2; a folder's name may have an equals sign, behind a slash."""
    done = subprocess.run(
        [ROOT / f"launch/{name}.sh", "experiment=demo"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (
        done.returncode == 2
        and done.stdout == ""
        and done.stderr
        == (
            "laminar: error: experiment=demo: the first word is RUN_DIR, the run's folder; "
            f"usage: launch/{name}.sh RUN_DIR [overrides]\n"
        )
    )


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def test_the_death_of_a_role_is_one_line(tmp_path: Path) -> None:
    """Promise: kill -9 of a rank leaves one line on its script's terminal, with what to do."""
    run_dir = tmp_path / "run"
    script = subprocess.Popen(
        [ROOT / "launch/controller.sh", run_dir, "experiment=demo", "restarts=0"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while (address := read_address(run_dir)) is None:
        assert script.poll() is None and time.monotonic() < deadline, "the controller was not up within 60 s"
        time.sleep(0.05)
    os.kill(address.pid, signal.SIGKILL)
    _, error = script.communicate(timeout=30)
    assert script.returncode == 1 and error == (
        f"laminar: error: controller 0 was killed by SIGKILL; see {run_dir}/logs/controller0.log; "
        "the others go on and wait for it (cluster.join_timeout_seconds); start it again with "
        "launch/controller.sh, the same arguments and resume=auto\n"
    )


def test_what_all_roles_would_refuse_is_said_once(tmp_path: Path) -> None:
    """Exit code 2 and one line, before anything starts."""
    words = [ROOT / "launch/all_roles.sh", tmp_path / "run", "experiment=demo", "nonsense=1"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=30, check=False)
    assert (
        done.returncode == 2 and done.stderr.startswith("laminar: error: ") and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "run").exists()


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[bytes]:
    words = [ROOT / "launch/all_roles.sh", run_dir, "experiment=demo", *overrides]
    return subprocess.Popen(words, cwd=ROOT, env=environment())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_roles_make_one_run(tmp_path: Path) -> None:
    """The roles find each other without a common rendezvous, train all steps, and every role exits with 0."""
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
