"""slurm/laminar_single.sbatch, the very script that users submit, on two nodes of a real Slurm: the whole
system over a network."""

import json
import sys
from pathlib import Path

import pytest

from helpers.runs import steps_done

pytestmark = pytest.mark.slurm
SCRIPT = "slurm/laminar_single.sbatch"
RUN_SECONDS = 420  # start-up of one SGLang server on a busy machine, then a few steps


def submit(cluster, run_dir: Path, *overrides: str) -> str:
    """Trainer and controller on n1, relay and rollout on n2."""
    settings = {"VENV": sys.prefix, "RUN_DIR": str(run_dir), "NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    return cluster.submit("--nodes=2", SCRIPT, "experiment=demo", *overrides, **settings)


@pytest.mark.timeout(600)
def test_demo_runs_over_two_nodes(slurm_cluster, tmp_path: Path) -> None:
    """The job completes, all steps are trained, and no trajectory saw two policies
    (docs/promises.md#one-policy), with the roles on two machines."""
    small = ["algorithm.prompts_per_step=4", "sampling.max_response_tokens=48", "evaluation.problems=8"]
    job = submit(slurm_cluster, tmp_path / "run", "steps=3", *small)
    assert slurm_cluster.wait(job, RUN_SECONDS) == "COMPLETED", slurm_cluster.output(job)[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["max_versions_per_trajectory"] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_job_goes_on_when_submitted_again(slurm_cluster, tmp_path: Path) -> None:
    """What Slurm does before a time limit (a signal to the batch script) stops the run in order and requeues
    the job, which goes on; `laminar stop` ends it for good, and the next job finishes the run."""
    run_dir = tmp_path / "run"
    first = submit(slurm_cluster, run_dir, "steps=1000")
    slurm_cluster.poll(lambda: steps_done(run_dir) >= 2, RUN_SECONDS, "two steps", first)
    slurm_cluster.command("scancel", "--batch", "--signal=USR1", first)
    again = "going on from the checkpoint"
    slurm_cluster.poll(lambda: again in slurm_cluster.output(first), RUN_SECONDS, "its next life", first)
    before = steps_done(run_dir)
    slurm_cluster.poll(lambda: steps_done(run_dir) > before, RUN_SECONDS, "a step of it", first)
    slurm_cluster.command(sys.executable, "-m", "laminar_hpc.launch.cli", "stop", str(run_dir))
    assert slurm_cluster.wait(first, 120) == "COMPLETED", slurm_cluster.output(first)[-3000:]
    done = steps_done(run_dir)
    assert 2 <= done < 1000
    second = submit(slurm_cluster, run_dir, f"steps={done + 2}")
    assert slurm_cluster.wait(second, RUN_SECONDS) == "COMPLETED", slurm_cluster.output(second)[-3000:]
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == done + 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_is_a_job_for_each_combination(slurm_cluster, tmp_path: Path) -> None:
    """`laminar train --multirun --slurm` submits what `slurm/` has, and each job's run is in the folder that
    the command named."""
    command = [sys.executable, "-m", "laminar_hpc.launch.cli", "train", "--multirun"]
    options = f"--slurm=--nodes=2 --output={slurm_cluster.folder}/%j.out"
    words = ["experiment=demo", "steps=1,2", f"run_dir={tmp_path}/run"]
    environment = {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    said = slurm_cluster.command(*command, options, *words, seconds=60, **environment)
    jobs = [line.split()[2:] for line in said.splitlines() if line.startswith("submitted")]
    assert [label for _, label, _ in jobs] == ["steps=1", "steps=2"], said
    for steps, (job, _, run_dir) in enumerate(jobs, 1):
        assert slurm_cluster.wait(job, RUN_SECONDS) == "COMPLETED", slurm_cluster.output(job)[-3000:]
        assert json.loads((Path(run_dir) / "summary.json").read_text())["steps"] == steps
