"""`laminar submit --apart`: a job for each role, by the very scripts that users submit, on a real Slurm."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helpers.runs import steps_done
from laminar_hpc.launch.cli import COMMANDS

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]
AGENT = "laminar_hpc.launch.slurm.node"
RUN_SECONDS = 600  # start-up of SGLang servers on a busy machine, then a few steps
SHARED = "--time=60 --mem=1000 --oversubscribe"  # four jobs on two nodes
SMALL = ["algorithm.prompts_per_step=8", "sampling.max_response_tokens=48", "evaluation.problems=32"]


def submit(cluster, run_dir: Path, *words: str) -> dict[str, str]:
    """The jobs of the demo, by their scripts' names."""
    assert "submit" in COMMANDS
    options = f"--slurm=--output={cluster.folder}/%A.out {SHARED}", "--controller=--cpus-per-task=1"
    command = [
        sys.executable,
        "-m",
        "laminar_hpc.launch.cli",
        "submit",
        "experiment=demo",
        "--apart",
        *options,
    ]
    environment = {"OMP_NUM_THREADS": "1", "STORE_DIR": str(run_dir.parent / "store")}
    said = cluster.command(*command, f"run_dir={run_dir}", *SMALL, *words, seconds=120, **environment)
    lines = [line.split() for line in said.splitlines() if line.startswith("submitted")]
    return {name: job for _, _, job, name in lines}


def restarts(cluster, job: str) -> int:
    words = cluster.command("scontrol", "-o", "show", "job", job).split()
    return int(next(word.partition("=")[2] for word in words if word.startswith("Restarts=")))


def check_end(cluster, run_dir: Path, jobs: dict[str, str], steps: int) -> None:
    """All jobs COMPLETED, all steps trained, and the audit clean."""
    for name, job in jobs.items():
        assert cluster.wait(job, RUN_SECONDS) == "COMPLETED", f"{name}: {cluster.output(job)[-3000:]}"
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps
    audit = [sys.executable, "-m", "laminar_hpc.launch.cli", "audit", str(run_dir)]
    done = subprocess.run(audit, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_jobs_apart_train_to_the_end(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): jobs of their own find each other by the run's folder,
    train all steps, and all end COMPLETED; the array is submitted again in mid-run, and its replica works
    too."""
    run_dir = tmp_path / "run"
    jobs = submit(slurm_cluster, run_dir, "steps=30")
    assert list(jobs) == ["control", "trainer", "rollouts"]
    slurm_cluster.poll(lambda: steps_done(run_dir) >= 1, RUN_SECONDS, "a step", jobs["control"])
    script = [*SHARED.split(), "slurm/rollouts.sbatch", "experiment=demo", *SMALL]
    settings = {"RUN_DIR": str(run_dir), "VENV": sys.prefix, "ROLLOUTS": "1", "OMP_NUM_THREADS": "1"}
    jobs["more"] = slurm_cluster.submit("--array=0-0", *script, "steps=30", **settings)
    check_end(slurm_cluster, run_dir, jobs, 30)
    assert sorted(path.name for path in (run_dir / "logs").glob("rollout*.log")) == [
        "rollout0.log",
        "rollout1.log",
    ]
    assert [path.name for path in (run_dir / "jobs").iterdir()] == ["ended"], "each took its own away"


def agents(run_dir: Path) -> dict[str, int]:
    """The pids of the run's agents, by role."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        with suppress(psutil.Error):
            if AGENT in words and process.environ().get("RUN_DIR") == str(run_dir):
                found[words[words.index(AGENT) + 1]] = process.pid
    return found


def test_the_agents_are_killed(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): SIGKILL to the agent of each job, one after the other, ends
    what it had started; the job starts it again, no job is requeued, and nothing is lost."""
    run_dir = tmp_path / "run"
    jobs = submit(slurm_cluster, run_dir, "steps=60", "checkpoint.every=2")
    for role, name in ("rollouts", "rollouts"), ("trainer", "trainer"), ("controller", "control"):
        before = steps_done(run_dir)
        slurm_cluster.poll(
            lambda before=before: steps_done(run_dir) >= before + 2, RUN_SECONDS, "steps", jobs[name]
        )
        os.kill(agents(run_dir)[role], signal.SIGKILL)
        again = f"the agent of the {role} has ended with exit code 137, killed by SIGKILL: started again, 1"
        slurm_cluster.poll(
            lambda name=name, again=again: again in slurm_cluster.output(jobs[name]), 60, again, jobs[name]
        )
    check_end(slurm_cluster, run_dir, jobs, 60)
    assert [restarts(slurm_cluster, job) for job in jobs.values()] == [0, 0, 0]
    assert not agents(run_dir)


def test_the_trainers_time_is_over(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): USR1 to the trainers' job, as before its limit, ends
    the trainers with a checkpoint; that job is requeued, the others go on, and all train the rest without a
    word. TERM, as at preemption, does the same. No step is trained twice."""
    run_dir = tmp_path / "run"
    jobs = submit(slurm_cluster, run_dir, "steps=60")
    for number, told in enumerate((["--batch", "--signal=USR1"], ["--signal=TERM"]), 1):
        before = steps_done(run_dir)
        slurm_cluster.poll(
            lambda before=before: steps_done(run_dir) >= before + 2, RUN_SECONDS, "two steps", jobs["control"]
        )
        slurm_cluster.command("scancel", *told, jobs["trainer"])
        slurm_cluster.poll(
            lambda number=number: restarts(slurm_cluster, jobs["trainer"]) >= number,
            RUN_SECONDS,
            f"requeue {number}",
            jobs["trainer"],
        )
    check_end(slurm_cluster, run_dir, jobs, 60)
    assert [restarts(slurm_cluster, jobs[name]) for name in ("control", "trainer", "rollouts")] == [0, 2, 0]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ended = [line["reason"] for line in records if line["kind"] == "gang_ended"]
    assert ended == ["SIGUSR1: the trainers have left", "SIGTERM: the trainers have left"]
    assert [line["step"] for line in records if line["kind"] == "step"] == list(range(1, 61))


def test_the_controller_s_time_is_over(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): USR1 to a controller's job without a spare stops the
    run with a checkpoint; all its jobs are requeued, and train the rest without a word."""
    run_dir = tmp_path / "run"
    jobs = submit(slurm_cluster, run_dir, "steps=60")
    slurm_cluster.poll(lambda: steps_done(run_dir) >= 2, RUN_SECONDS, "two steps", jobs["control"])
    slurm_cluster.command("scancel", "--batch", "--signal=USR1", jobs["control"])
    check_end(slurm_cluster, run_dir, jobs, 60)
    assert all(restarts(slurm_cluster, job) == 1 for job in jobs.values())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in records if line["kind"] == "end"] == ["SIGUSR1", "done"]


def test_a_complete_run_is_not_requeued(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): `laminar stop` ends all jobs for good, and a second
    submission goes on; one of a complete run submits nothing."""
    run_dir = tmp_path / "run"
    jobs = submit(slurm_cluster, run_dir, "steps=1000")
    slurm_cluster.poll(lambda: steps_done(run_dir) >= 2, RUN_SECONDS, "two steps", jobs["control"])
    slurm_cluster.command(sys.executable, "-m", "laminar_hpc.launch.cli", "stop", str(run_dir))
    for job in jobs.values():
        assert slurm_cluster.wait(job, RUN_SECONDS) == "COMPLETED", slurm_cluster.output(job)[-3000:]
        assert restarts(slurm_cluster, job) == 0
    steps = steps_done(run_dir) + 2
    check_end(slurm_cluster, run_dir, submit(slurm_cluster, run_dir, f"steps={steps}", "resume=auto"), steps)
    started = time.monotonic()
    assert submit(slurm_cluster, run_dir, f"steps={steps}", "resume=auto") == {}
    assert time.monotonic() - started < 100


def test_nobody_waits_for_a_controller_that_has_failed(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): the jobs that wait for a controller's job end with it,
    when that fails before the run has begun; those that are submitted afterwards wait for the next one."""
    run_dir = tmp_path / "run"
    settings = {"RUN_DIR": str(run_dir), "VENV": sys.prefix, "ROLLOUTS": "1"}
    script = [*SHARED.split(), "slurm/rollouts.sbatch", "experiment=demo"]
    waits = slurm_cluster.submit(*script, **settings)
    slurm_cluster.poll(lambda: list(run_dir.glob("jobs/rollouts.*")), 60, "the rollouts", waits)
    control = [*SHARED.split(), "slurm/control.sbatch", "experiment=demo"]
    broken = slurm_cluster.submit(*control, **settings | {"VENV": "/nonexistent", "WAIT_FOR": ""})
    assert [slurm_cluster.wait(job, 60) for job in (broken, waits)] == ["FAILED", "FAILED"]
    assert "the run has failed" in slurm_cluster.output(waits)
    later = slurm_cluster.submit(*script, **settings)
    slurm_cluster.poll(lambda: "waits for" in slurm_cluster.output(later), 60, "the next rollouts", later)
    assert slurm_cluster.state(later) == "RUNNING"
    slurm_cluster.command("scancel", later)
    slurm_cluster.wait(later, 60)


def test_a_trainer_node_dies(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): the power of one of the trainers' two nodes is cut.
    Their job is requeued, controller and rollouts go on, in one life each, and the trainers go on from the
    newest checkpoint."""
    if slurm_cluster.mode() == "plain":
        pytest.skip("nodes without namespaces of their own cannot lose power: that needs CAP_SYS_ADMIN")
    run_dir = tmp_path / "run"
    places = ["--trainer=--nodes=2", "--controller=--nodelist=n1", "--rollouts=--nodelist=n1"]
    layout = ["trainer.data_parallel=2", "checkpoint.every=2"]
    jobs = submit(slurm_cluster, run_dir, "steps=60", *places, *layout)
    slurm_cluster.poll(lambda: steps_done(run_dir) >= 5, RUN_SECONDS, "five steps", jobs["control"])
    slurm_cluster.node("off", "n2")
    try:
        slurm_cluster.poll(
            lambda: restarts(slurm_cluster, jobs["trainer"]) == 1, 120, "the requeue", jobs["trainer"]
        )
    finally:
        slurm_cluster.node("on", "n2")
    check_end(slurm_cluster, run_dir, jobs, 60)
    assert [restarts(slurm_cluster, jobs[name]) for name in ("control", "trainer", "rollouts")] == [0, 1, 0]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    restored = [line["restored_step"] for line in records if line["kind"] == "restored"]
    assert restored[0] is None and restored[-1] >= 4 and restored[-1] % 2 == 0


def test_the_trainers_wait_in_the_queue(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): the trainers' job is requeued and gets no nodes for
    longer than cluster.join_timeout_seconds: controller and rollouts go on, in one life each, and wait for
    it."""
    run_dir, seconds = tmp_path / "run", 60
    jobs = submit(slurm_cluster, run_dir, "steps=60", f"cluster.join_timeout_seconds={seconds}")
    slurm_cluster.poll(lambda: steps_done(run_dir) >= 2, RUN_SECONDS, "two steps", jobs["control"])
    slurm_cluster.command("scontrol", "requeuehold", jobs["trainer"])
    said = "their job is in Slurm's queue"
    control = jobs["control"]
    slurm_cluster.poll(lambda: said in slurm_cluster.output(control), 3 * seconds, "the longer wait", control)
    slurm_cluster.command("scontrol", "release", jobs["trainer"])
    check_end(slurm_cluster, run_dir, jobs, 60)
    assert [restarts(slurm_cluster, jobs[name]) for name in ("control", "rollouts")] == [0, 0]
