"""slurm/laminar_hetjob.sbatch: controller, trainers and rollouts as one heterogeneous job of a real Slurm, by
the very script that users submit."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from test_separate_jobs import RUN_SECONDS, SHARED, SMALL, check_end, restarts, steps_done

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]
ROLES = ("controller", "trainer", "rollouts")


def submit(cluster, run_dir: Path, *words: str) -> str:
    """The job of the demo: controller and trainer on n1, the rollouts on n2."""
    places = (
        "--controller=--nodelist=n1 --cpus-per-task=1",
        "--trainer=--nodelist=n1",
        "--rollouts=--nodelist=n2",
    )
    options = f"--slurm=--output={cluster.folder}/%j.out {SHARED}", *places
    command = [sys.executable, "-m", "laminar_hpc.cli", "submit", "experiment=demo", "--hetjob", *options]
    environment = {"OMP_NUM_THREADS": "1", "STORE_DIR": str(run_dir.parent / "store")}
    said = cluster.command(*command, f"run_dir={run_dir}", *SMALL, *words, seconds=120, **environment)
    (job,) = [line.split()[2] for line in said.splitlines() if line.startswith("submitted")]
    return job


def sbatch(cluster, script: Path, run_dir: Path, *words: str, **environment: str) -> str:
    """As the line that `laminar submit` prints."""
    part = [*SHARED.split(), "--cpus-per-task=1"]
    settings = {"RUN_DIR": str(run_dir), "VENV": sys.prefix, "OMP_NUM_THREADS": "1", **environment}
    return cluster.submit(*part, ":", *part, ":", *part, str(script), "experiment=demo", *words, **settings)


def test_it_is_requeued_whole_and_trains_to_the_end(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/architecture.md#failure-domains): USR1 to its script, as before the time limit, and the
    loss of one of its nodes each requeue all three components, which go on from the newest checkpoint."""
    if slurm_cluster.mode() == "plain":
        pytest.skip("nodes without namespaces of their own cannot lose power: that needs CAP_SYS_ADMIN")
    run_dir = tmp_path / "run"
    job = submit(slurm_cluster, run_dir, "steps=40", "checkpoint.every=2")
    slurm_cluster.poll(lambda: steps_done(run_dir) >= 3, RUN_SECONDS, "three steps", job)
    slurm_cluster.command("scancel", "--batch", "--signal=USR1", job)
    slurm_cluster.poll(lambda: restarts(slurm_cluster, job) == 1, RUN_SECONDS, "the requeue", job)
    before = steps_done(run_dir)
    slurm_cluster.poll(lambda: steps_done(run_dir) >= before + 3, RUN_SECONDS, "three more steps", job)
    slurm_cluster.node("off", "n2")
    try:
        slurm_cluster.poll(lambda: restarts(slurm_cluster, job) == 2, 120, "the second requeue", job)
    finally:
        slurm_cluster.node("on", "n2")
    check_end(slurm_cluster, run_dir, {"hetjob": job}, 40)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in records if line["kind"] == "end"] == ["SIGUSR1", "done"]
    assert not list((run_dir / "jobs").glob("*")), "it has taken its files away"


def test_it_fails_at_once_and_is_not_requeued(slurm_cluster, tmp_path: Path) -> None:
    """Promise (docs/architecture.md#failure-domains): what is refused on its nodes ends all components, with
    the line that says why."""
    job = sbatch(slurm_cluster, Path("slurm/laminar_hetjob.sbatch"), tmp_path / "run", "nonsense=1")
    assert slurm_cluster.wait(job, 120) == "FAILED"
    assert "nonsense: no such key" in slurm_cluster.output(job) and restarts(slurm_cluster, job) == 0
