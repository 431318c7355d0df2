"""docs/promises.md#drains, #outlives-its-controller: real roles whose controller has died and does not
start again by itself. One is told to end, another controller would begin anew, the user asks for a stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.paths import ROOT
from helpers.runs import SHORT, assert_clean, consumed, metrics, summary


def wait(condition: Callable[[], object], what: str, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.1)


def pids(run_dir: Path) -> dict[str, int]:
    """By role, as the controller saw them last."""
    status = json.loads((run_dir / "status.json").read_text())
    return {rank["role"]: rank["pid"] for rank in status["ranks"]} | {"controller": status["pid"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_while_there_is_no_controller(tmp_path):
    """A rollout that gets TERM ends with 0 and leaves what it had; a controller without
    resume=auto is refused and moves nothing; `laminar stop` waits for the next one, which has all of it."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: dict[str, subprocess.Popen] = {}

    def start(role: str, *more: str) -> subprocess.Popen:
        with open(log, "a") as out:
            command = [ROOT / f"launch/{role}.sh", run_dir, *SHORT, "steps=30", "restarts=0", *more]
            started[role] = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=ROOT, env=environment, start_new_session=True
            )
        return started[role]

    try:
        for role in ("controller", "relay", "rollout", "trainer"):
            start(role)
        wait(lambda: (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir, "step")) >= 2, "step 2")
        ranks = pids(run_dir)
        os.kill(ranks["controller"], signal.SIGKILL)
        started["controller"].wait(60)
        os.kill(ranks["rollout"], signal.SIGTERM)
        assert started["rollout"].wait(30) == 0
        left = list((run_dir / "unsaid").iterdir())
        assert [path.name.split(":")[0] for path in left] == ["rollout"]

        before = sorted(path.name for path in tmp_path.iterdir())
        assert start("controller").wait(60) == 2
        refusal = [line for line in log.read_text().splitlines() if "whose controller is gone" in line][-1]
        assert all(f"{role} 0 (pid {ranks[role]} of" in refusal for role in ("relay", "trainer"))
        assert sorted(path.name for path in tmp_path.iterdir()) == before

        stop = [sys.executable, "-m", "laminar_hpc.launch.cli", "stop", str(run_dir)]
        said = subprocess.run(stop, capture_output=True, text=True, env=environment, timeout=60, check=True)
        assert "has no controller now: the request waits there" in said.stdout
        assert start("controller", "resume=auto").wait(120) == 0
        assert started["trainer"].wait(60) == 0 and started["relay"].wait(60) == 0
    finally:
        for process in started.values():
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()
    assert not list((run_dir / "unsaid").iterdir()) and "Traceback" not in log.read_text()
    assert 2 <= summary(run_dir)["steps"] < 30 and consumed(run_dir)
    assert_clean(run_dir)
