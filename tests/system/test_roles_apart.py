"""A torchrun per role (`launch/`): a rollout and a relay may die at any time; the others go on, and they can
come back."""

import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from runs import SHORT, consumed, metrics, summary

from audits import assert_clean

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
        (
            p
            for p in found
            if "laminar_hpc" in p.info["cmdline"] and "--rdzv-backend=c10d" not in p.info["cmdline"]
        ),
        key=lambda p: p.create_time(),
    )


def wait_for_step(run_dir: Path, step: int, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not (run_dir / "metrics.jsonl").exists() or not any(
        r["step"] >= step for r in metrics(run_dir, "step")
    ):
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
            [ROOT / "launch/all_roles.sh", *words],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            for role, at in (("rollout", 2), ("relay", 4)):
                wait_for_step(run_dir, at)
                rank_of(role, run_dir).kill()
                again.append(
                    subprocess.Popen(
                        [ROOT / f"launch/{role}.sh", *words],
                        stdout=out,
                        stderr=out,
                        cwd=ROOT,
                        start_new_session=True,
                    )
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
    assert (
        figures["steps"] == STEPS
        and figures["max_versions_per_trajectory"] == 1
        and figures["staleness_training_max"] <= 2
    )
    trained = [t for batch in consumed(run_dir).values() for t in batch]
    assert len(trained) == len(set(trained)) == STEPS * 256
    assert_clean(run_dir)
    errors = [
        line for line in (tmp_path / "out").read_text().splitlines() if "error" in line or "Traceback" in line
    ]
    assert errors == [
        f"laminar: error: {role} 0 was killed by SIGKILL; see {run_dir}/logs/{role}0.log; "
        f"the others go on; start it again with launch/{role}.sh and the same arguments"
        for role in ("rollout", "relay")
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_without_its_trainer_ends_with_one_line_and_goes_on(tmp_path):
    """Within 25 s, and says what to do, which is then done: nothing is left in shared memory, no step is lost
    but those since the newest checkpoint."""
    role = "trainer"
    run_dir = tmp_path / "without-trainer"  # a name of its own in shared memory
    words = [ROOT / "launch/all_roles.sh", run_dir, *SHORT, "checkpoint.every=2", "evaluation.problems=8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "out", "w") as out:
        first = subprocess.Popen([*words, "steps=100"], stdout=out, stderr=out, cwd=ROOT, env=environment)
        try:
            wait_for_step(run_dir, 3)
            rank_of(role, run_dir).kill()
            assert first.wait(25) == 1
        finally:
            if first.poll() is None:
                first.send_signal(signal.SIGTERM)
                first.wait(60)
    errors = [
        line for line in (tmp_path / "out").read_text().splitlines() if "error" in line or "Traceback" in line
    ]
    assert errors == [
        f"laminar: error: {role} 0 was killed by SIGKILL; see {run_dir}/logs/{role}0.log; "
        "the run ends without it; start all roles again with resume=auto: "
        "it goes on from its newest checkpoint"
    ]
    assert not list(Path("/dev/shm").glob(f"laminar-{run_dir.name}-*"))
    again = subprocess.run(
        [*words, "steps=4", "resume=auto"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )
    assert again.returncode == 0 and "going on from the checkpoint of step" in again.stdout, (
        again.stdout + again.stderr
    )
    assert_clean(run_dir)


def tokens_per_second(run_dir: Path, begin: float, end: float) -> float:
    """Of the responses that ended between these moments."""
    database = sqlite3.connect(f"file:{run_dir / 'store.sqlite'}?mode=ro", uri=True)
    (tokens,) = database.execute(
        "SELECT COALESCE(SUM(response_length), 0) FROM trajectories WHERE time_finished BETWEEN ? AND ?",
        (begin, end),
    ).fetchone()
    database.close()
    return tokens / (end - begin)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_controller_dies_twice_and_the_run_goes_on(tmp_path):
    """docs/architecture.md#outlives-its-controller, with a real trainer, relay and engine: nobody else is
    started anew, each step is done once, and decisions are made again within 15 s."""
    run_dir = tmp_path / "run"
    words = [str(run_dir), *SHORT, f"steps={STEPS}"]
    with open(tmp_path / "out", "w") as out:
        everything = subprocess.Popen(
            [ROOT / "launch/all_roles.sh", *words],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            deaths = []
            for at in (3, 6):
                wait_for_step(run_dir, at)
                others = {role: rank_of(role, run_dir).pid for role in ("trainer", "relay", "rollout")}
                deaths.append(time.time())
                rank_of("controller", run_dir).kill()
                deadline = time.monotonic() + 60
                while len(metrics(run_dir, "controller_back")) < len(deaths):
                    assert time.monotonic() < deadline, (tmp_path / "out").read_text()
                    time.sleep(0.1)
            assert everything.wait(300) == 0, (tmp_path / "out").read_text()
        finally:
            if everything.poll() is None:
                everything.send_signal(signal.SIGTERM)
                everything.wait(60)
    said = (tmp_path / "out").read_text()
    assert "controller: 1 of 10" in said and "controller: 2 of 10" in said
    assert said.count("the controller is back after") == 2
    assert "laminar: error" not in said and "Traceback" not in said and said.count("trainer ranks") == 1
    assert len(others) == 3 and summary(run_dir)["steps"] == STEPS
    assert [record["step"] for record in metrics(run_dir, "step")] == list(range(1, STEPS + 1))
    trained = [t for batch in consumed(run_dir).values() for t in batch]
    assert len(trained) == len(set(trained)) == STEPS * 256
    assert_clean(run_dir)
    back = [record["seconds"] for record in metrics(run_dir, "controller_back")]
    print("controller_seconds", back)
    for death, seconds in zip(deaths, back, strict=True):
        before = tokens_per_second(run_dir, death - 10, death)
        over = tokens_per_second(run_dir, death, death + seconds)
        print(f"tokens/s {before:.0f} before, {over:.0f} over the outage")
    assert max(back) < 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_controller_that_stands_still_is_waited_for(tmp_path):
    """Longer than cluster.heartbeat_timeout_seconds: nobody ends, nobody is taken for dead, no step is done
    twice."""
    run_dir = tmp_path / "run"
    with open(tmp_path / "out", "w") as out:
        everything = subprocess.Popen(
            [ROOT / "launch/all_roles.sh", str(run_dir), *SHORT, "steps=6"],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            wait_for_step(run_dir, 2)
            controller = rank_of("controller", run_dir)
            controller.suspend()
            time.sleep(25)  # how long it stands still is what is tested
            controller.resume()
            assert everything.wait(200) == 0, (tmp_path / "out").read_text()
        finally:
            if everything.poll() is None:
                everything.send_signal(signal.SIGTERM)
                everything.wait(60)
    said = (tmp_path / "out").read_text()
    assert "laminar: error" not in said and "Traceback" not in said and "controller: 1 of" not in said
    assert [record["step"] for record in metrics(run_dir, "step")] == list(range(1, 7))
    assert not metrics(run_dir, "regranted")
    assert_clean(run_dir)
