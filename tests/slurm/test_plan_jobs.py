"""What `laminar plan` writes, on a real Slurm with `laminar submit --plan`. Trainer, relays, controller and
rollouts are real; engines are emulated."""

import json
import os
import sys
from pathlib import Path

import pytest

from helpers.runs import assert_clean
from helpers.small_plans import SMALL, WORK
from laminar_hpc.simulator import plan_command
from laminar_hpc.simulator.divisions import candidates
from laminar_hpc.simulator.plan import Plan, RatedCandidate, evaluate
from laminar_hpc.simulator.settings import load_plan

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
RUN_SECONDS = 400  # start-up of a trainer on a busy machine, then some steps
QUESTION = [*WORK, "name=two", "pools=[{gpu: H100, count: 1}, {gpu: H100, count: 2}]"]  # two machines


def planned(folder: Path) -> Path:
    """Writes the experiment of a plan that trains on one machine and has two replicas on the other."""
    config = load_plan("mixed", QUESTION)
    best = max(candidates(config), key=lambda candidate: candidate.replicas)
    assert (best.trainer_gpus, best.replicas) == (1, 2)
    found = Plan(RatedCandidate(best, 0.0, figures=evaluate(config, best)), None, 1, 1)
    plan_command.write(config, found, folder)
    return folder / "experiment" / "two.yaml"


def records(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_done(run_dir: Path) -> int:
    return max((line["step"] for line in records(run_dir) if line["kind"] == "step"), default=0)


def pulled(run_dir: Path) -> set[int]:
    """Replicas that have loaded weights."""
    return {line["replica"] for line in records(run_dir) if line["kind"] == "pull"}


def environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}


def test_a_plan_is_submitted_by_its_file(slurm_cluster, tmp_path: Path) -> None:
    """Promise: `laminar submit --plan FILE` submits jobs that train what was planned to the end."""
    file = planned(tmp_path)
    run_dir = tmp_path / "run"
    options = f"--slurm=--output={slurm_cluster.folder}/%A.out --time=60 --mem=1000 --oversubscribe"
    command = [sys.executable, "-m", "laminar_hpc.launch.cli", "submit", f"--plan={file}", "--apart", options]
    said = slurm_cluster.command(
        *command, *SMALL, f"run_dir={run_dir}", "steps=4", seconds=120, **environment()
    )
    lines = [line.split() for line in said.splitlines() if line.startswith("submitted")]
    jobs = {name: job for _, _, job, name in lines}
    assert list(jobs) == ["control", "trainer", "rollouts"], said
    for name, job in jobs.items():
        assert slurm_cluster.wait(job, RUN_SECONDS) == "COMPLETED", (
            f"{name}: {slurm_cluster.output(job)[-3000:]}"
        )
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 4
    assert pulled(run_dir) <= {0, 1}
    assert_clean(run_dir)
