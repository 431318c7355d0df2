"""What `laminar plan` writes, on a real Slurm: its heterogeneous job, and `laminar submit --plan`. Trainer,
relays, controller and rollouts are real; engines are emulated."""

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


def planned(folder: Path) -> tuple[Path, str]:
    """Writes the files of a plan that trains on one machine and has two replicas on the other; gives the
    experiment and the line that submits its job."""
    config = load_plan("mixed", QUESTION)
    best = max(candidates(config), key=lambda candidate: candidate.replicas)
    assert (best.trainer_gpus, best.replicas) == (1, 2)
    found = Plan(RatedCandidate(best, 0.0, figures=evaluate(config, best)), None, 1, 1)
    lines = plan_command.write(config, found, folder)
    submits = next(line for line in lines if line.startswith("or "))
    return folder / "experiment" / "two.yaml", submits.removeprefix("or").partition(" data.train")[0].strip()


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


def test_the_job_of_a_plan_trains_on_all_its_machines(slurm_with_gpus, tmp_path: Path) -> None:
    """Promise: NAME.sbatch, submitted as the plan prints it, gets the GPUs of both pools, starts every
    process, ends in order at USR1, and a second submission goes on to the end."""
    cluster, run_dir = slurm_with_gpus, tmp_path / "runs" / "two"
    _, line = planned(tmp_path)
    script = tmp_path / "without-gpus.sh"  # those that Slurm gives cannot be used
    script.write_text(f'#!/usr/bin/env bash\nCUDA_VISIBLE_DEVICES= exec {tmp_path}/two.sh "$@"\n')
    script.chmod(0o755)

    def submit(steps: int) -> str:
        command = line.replace("sbatch ", "sbatch --parsable ")
        settings = " ".join(f"'{word}'" for word in [*SMALL, f"steps={steps}"])
        variables = environment() | {"SCRIPT": str(script)}
        return cluster.command("bash", "-c", f"{command} {settings}", **variables).strip()

    def log(job: str) -> str:
        path = tmp_path / f"two-{job}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else "it has said nothing"

    def ended(job: str) -> bool:
        return cluster.state(job) in ("COMPLETED", "FAILED", "CANCELLED")

    first = submit(1000)
    cluster.poll(
        lambda: (steps_done(run_dir) >= 2 and pulled(run_dir) == {0, 1}) or ended(first),
        RUN_SECONDS,
        "two steps, and weights at both replicas",
    )
    assert not ended(first), log(first)
    shown = cluster.command("scontrol", "-o", "show", "job", first)
    assert [shown.count(f"gres:gpu:h100:{gpus}") for gpus in (1, 2)] == [1, 1], shown
    cluster.command("scancel", "--batch", "--signal=USR1", first)
    assert cluster.wait(first, RUN_SECONDS) == "COMPLETED", log(first)
    steps = steps_done(run_dir)
    assert 2 <= steps < 1000

    second = submit(steps + 2)
    assert cluster.wait(second, RUN_SECONDS) == "COMPLETED", log(second)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == steps + 2
    assert_clean(run_dir)


def test_a_plan_is_submitted_by_its_file(slurm_cluster, tmp_path: Path) -> None:
    """Promise: `laminar submit --plan FILE` submits jobs that train what was planned to the end."""
    file, _ = planned(tmp_path)
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
