"""A torchrun per role (`launch/`): a rollout and a relay may die at any time; the others go on, and they can come back."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from runs import SHORT, consumed, metrics, summary

ROOT = Path(__file__).parents[2]
STEPS = 10


def rank_of(role: str, run_dir: Path) -> psutil.Process:
    """The newest rank of a role that is not torchrun itself."""
    found = [
        p
        for p in psutil.process_iter(["cmdline"])
        if f"role={role}" in (p.info["cmdline"] or []) and f"run_dir={run_dir}" in p.info["cmdline"]
    ]
    return max(
        (p for p in found if "laminar_hpc" in p.info["cmdline"] and "--rdzv-backend=c10d" not in p.info["cmdline"]),
        key=lambda p: p.create_time(),
    )


def wait_for_step(run_dir: Path, step: int, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not (run_dir / "metrics.jsonl").exists() or not any(r["step"] >= step for r in metrics(run_dir, "step")):
        assert time.monotonic() < deadline, f"step {step} was not reached within {seconds} s"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rollout_and_a_relay_die_and_come_back(tmp_path):
    """docs/architecture.md#roles-apart; #one-policy and #nothing-lost hold over both deaths."""
    run_dir = tmp_path / "run"
    words = [str(run_dir), *SHORT, f"steps={STEPS}"]
    again = []
    with open(tmp_path / "out", "w") as out:
        everything = subprocess.Popen(
            [ROOT / "launch/all_roles.sh", *words], stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            for role, at in (("rollout", 2), ("relay", 4)):
                wait_for_step(run_dir, at)
                rank_of(role, run_dir).kill()
                again.append(
                    subprocess.Popen([ROOT / f"launch/{role}.sh", *words], stdout=out, stderr=out, cwd=ROOT, start_new_session=True)
                )
            assert everything.wait(300) == 1, "two roles failed, and that is said at the end"
            assert [p.wait(60) for p in again] == [0, 0]
        finally:
            for process in again:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            if everything.poll() is None:
                everything.send_signal(signal.SIGTERM)
                everything.wait(60)
    figures = summary(run_dir)
    assert figures["steps"] == STEPS and figures["max_versions_per_trajectory"] == 1 and figures["staleness_training_max"] <= 2
    trained = [t for batch in consumed(run_dir).values() for t in batch]
    assert len(trained) == len(set(trained)) == STEPS * 256
    text = (tmp_path / "out").read_text()
    assert "rollout 0 (pid" in text and "relay 0 (pid" in text and "the others go on" in text
