"""Roles apart (`launch/`): a rollout and a relay may die at any time; the others go on, and they can
come back."""

import os
import random
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from helpers.paths import ROOT
from helpers.runs import SHORT, assert_clean, consumed, metrics, summary

STEPS = 10


def ranks_of(run_dir: Path, role: str) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if {f"role={role}", f"run_dir={run_dir}", "laminar_hpc"} <= set(p.info["cmdline"] or [])
    ]


def rank_of(role: str, run_dir: Path) -> psutil.Process:
    """The newest one."""
    return max(ranks_of(run_dir, role), key=lambda p: p.create_time())


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
    """docs/promises.md#roles-apart; #one-policy and #nothing-lost hold over both deaths."""
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
        f"the others go on; {cure}"
        for role, cure in (
            ("rollout", "start another with launch/rollout.sh at any time"),
            ("relay", "start it again with launch/relay.sh and the same arguments"),
        )
    ]


def trainer_seconds(run_dir: Path, since: float) -> tuple[float, float]:
    """From `since` (Unix time) until the next trainers have loaded, and until they have done a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        restored = [r["time"] for r in metrics(run_dir, "restored") if r["time"] > since]
        steps = [r["time"] for r in metrics(run_dir, "step") if restored and r["time"] > restored[0]]
        if steps:
            return restored[0] - since, steps[0] - since
        time.sleep(0.1)
    raise AssertionError("no trainers came again within 120 s")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainers_die_twice_and_are_replaced_while_the_others_go_on(tmp_path):
    """docs/promises.md#roles-apart; #nothing-lost and #one-policy hold over both deaths, at moments that
    chance has chosen: the rollout and the relay are the same processes to the end, weight ids rise, the audit
    is clean, and the run learns."""
    run_dir, chance = tmp_path / "run", random.Random()
    words = [str(run_dir), *SHORT, "steps=40", "checkpoint.every=2"]
    with open(tmp_path / "out", "w") as out:
        everything = subprocess.Popen(
            [ROOT / "launch/all_roles.sh", *words],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            wait_for_step(run_dir, 1)
            stay = [rank_of(role, run_dir).pid for role in ("relay", "rollout", "controller")]
            for at in (3, 9):
                wait_for_step(run_dir, at)
                time.sleep(chance.uniform(0.0, 3.0))
                killed = time.time()
                rank_of("trainer", run_dir).kill()
                loaded, stepped = trainer_seconds(run_dir, killed)
                print(f"trainer_seconds {stepped:.1f}, of which until loaded {loaded:.1f}")
                assert stepped <= 60
            assert [rank_of(role, run_dir).pid for role in ("relay", "rollout", "controller")] == stay
            assert everything.wait(300) == 0
        finally:
            if everything.poll() is None:
                everything.send_signal(signal.SIGTERM)
                everything.wait(60)
    assert_clean(run_dir)
    figures = summary(run_dir)
    assert figures["steps"] == 40 and figures["max_versions_per_trajectory"] == 1
    assert figures["staleness_training_max"] <= 2
    assert figures["accuracy_after"] > figures["accuracy_before"] + 0.1
    ids = [r["weight_id"] for r in metrics(run_dir, "publish")]
    assert ids == sorted(set(ids))
    said = (tmp_path / "out").read_text()
    assert len(re.findall(r"trainer 0 .* has died.*; the others go on, and wait up to 300 s", said)) == 2
    assert len(re.findall(r"restart +trainer: [12] of 10 within an hour", said)) == 2 and "error" not in said


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
    """docs/promises.md#outlives-its-controller, with a real trainer, relay and engine: nobody else is
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


def wait_for_pulls(run_dir: Path, replicas: set[int], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not replicas <= {r["replica"] for r in metrics(run_dir, "pull")}:
        assert time.monotonic() < deadline, f"replicas {replicas} have not loaded weights in {seconds} s"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rollouts_come_and_go(tmp_path):
    """docs/promises.md#come-and-go and #drains, with real engines: a run of two replicas starts with one,
    a second and a third join; TERM to the first one lets it leave in order with exit code 0 within 20 s, and
    no token is lost; kill -9 of the second takes nothing from the third, its neighbour in one script."""
    run_dir = tmp_path / "run"
    words = [str(run_dir), *SHORT, "steps=40", "rollout.replicas=2", "rollout.replicas_min=1"]
    words += ["pipeline.repack=kv", "evaluation.files=[]"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "out", "w") as out:

        def start(script: str, **more: str) -> subprocess.Popen:
            command = [ROOT / f"launch/{script}.sh", *words]
            env = {**environment, **more}
            return subprocess.Popen(
                command, stdout=out, stderr=out, cwd=ROOT, env=env, start_new_session=True
            )

        started = [start("all_roles")]
        try:
            wait_for_step(run_dir, 1)
            first = rank_of("rollout", run_dir)
            started.append(start("rollout", ROLLOUTS="2"))
            wait_for_pulls(run_dir, {0, 1, 2})
            for _ in range(2):  # as `timeout` and some terminals do
                first.send_signal(signal.SIGTERM)
            psutil.wait_procs([first], 20)
            assert not first.is_running(), (run_dir / "logs/rollout0.log").read_text()
            hello = re.search(r"rollout 1 joined \(pid (\d+)", (run_dir / "logs/controller0.log").read_text())
            assert hello is not None
            os.kill(int(hello.group(1)), signal.SIGKILL)
            assert [process.wait(400) for process in started] == [0, 1], (tmp_path / "out").read_text()
        finally:
            for process in started:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(60)
    assert [r["replica"] for r in metrics(run_dir, "leaving")] == [0]
    assert summary(run_dir)["steps"] == 40
    assert_clean(run_dir)
    said = (tmp_path / "out").read_text()
    assert [line for line in said.splitlines() if "error" in line or "Traceback" in line] == [
        f"laminar: error: rollout 1 was killed by SIGKILL; see {run_dir}/logs/rollout1.log; "
        "the others go on; start another with launch/rollout.sh at any time"
    ]


@pytest.mark.slow
def test_a_launch_script_that_is_told_to_end_before_the_run_has_begun(tmp_path):
    """Nothing waits for it, and it has failed at nothing: exit code 0 within seconds, whatever it was at."""
    for role in ("rollout", "relay"):
        process = subprocess.Popen(
            [ROOT / f"launch/{role}.sh", str(tmp_path / "run"), *SHORT],
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        deadline = time.monotonic() + 60
        while not ranks_of(tmp_path / "run", role):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, process.stderr.read()
