"""slurm/laminar_hetjob.sbatch: controller, trainers and rollouts as one heterogeneous job of a real Slurm, by
the very script that users submit."""

import json
import sys
from pathlib import Path

import pytest
from test_separate_jobs import RUN_SECONDS, SMALL, check_end, restarts, steps_done

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]


def submit(cluster, run_dir: Path, *words: str) -> str:
    """The job of the demo, by the shipped script as it is."""
    command = [sys.executable, "-m", "laminar_hpc.launch.cli", "submit", "experiment=demo", "--hetjob"]
    options = f"--slurm=--output={cluster.folder}/%j.out --time=60"
    environment = {"OMP_NUM_THREADS": "1", "STORE_DIR": str(run_dir.parent / "store")}
    said = cluster.command(
        *command, options, f"run_dir={run_dir}", *SMALL, *words, seconds=120, **environment
    )
    (job,) = [line.split()[2] for line in said.splitlines() if line.startswith("submitted")]
    return job


def test_it_is_requeued_whole_and_trains_to_the_end(three_nodes, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): USR1 to its script, as before the time limit, and the
    loss of one of its nodes each requeue all three components, which go on from the newest checkpoint."""
    if three_nodes.mode() == "plain":
        pytest.skip("nodes without namespaces of their own cannot lose power: that needs CAP_SYS_ADMIN")
    run_dir = tmp_path / "run"
    job = submit(three_nodes, run_dir, "steps=40", "checkpoint.every=2")
    three_nodes.poll(lambda: steps_done(run_dir) >= 3, RUN_SECONDS, "three steps", job)
    three_nodes.command("scancel", "--batch", "--signal=USR1", job)
    three_nodes.poll(lambda: restarts(three_nodes, job) == 1, RUN_SECONDS, "the requeue", job)
    before = steps_done(run_dir)
    three_nodes.poll(lambda: steps_done(run_dir) >= before + 3, RUN_SECONDS, "three more steps", job)
    three_nodes.node("off", "n3")
    try:
        three_nodes.poll(lambda: restarts(three_nodes, job) == 2, 120, "the second requeue", job)
    finally:
        three_nodes.node("on", "n3")
    check_end(three_nodes, run_dir, {"hetjob": job}, 40)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in records if line["kind"] == "end"] == ["SIGUSR1", "done"]
    assert [path.name for path in (run_dir / "jobs").iterdir()] == ["ended"], "it took its own away"


def test_it_fails_at_once_and_is_not_requeued(three_nodes, tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): what is refused on its nodes ends all components, with
    the line that says why."""
    part, settings = "--time=60", {"RUN_DIR": str(tmp_path / "run"), "VENV": sys.prefix}
    words = [part, ":", part, ":", part, "slurm/laminar_hetjob.sbatch", "experiment=demo", "nonsense=1"]
    job = three_nodes.submit(*words, **settings)
    assert three_nodes.wait(job, 120) == "FAILED"
    assert "nonsense: no such key" in three_nodes.output(job) and restarts(three_nodes, job) == 0
