"""A mixed plan as it is written: its script starts every machine's part, real trainer, relays and controller,
with emulated engines."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from helpers.runs import assert_clean
from helpers.small_plans import SMALL, WORK
from laminar_hpc.simulator import plan_command
from laminar_hpc.simulator.divisions import candidates
from laminar_hpc.simulator.plan import Plan, RatedCandidate, evaluate
from laminar_hpc.simulator.plan_files import rollout_machines
from laminar_hpc.simulator.settings import load_plan

POOLS = "pools=[{gpu: H100, count: 1}, {gpu: H20, count: 2}, {gpu: A100, count: 1}]"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_mixed_plan_starts_all_replicas(tmp_path):
    """Promise: NAME.sh on each machine starts the trainer and every replica of every pool, and they train
    together to the end."""
    config = load_plan("mixed", [*WORK, POOLS, "name=kinds"])
    best = max(candidates(config), key=lambda candidate: candidate.replicas)  # on all GPUs, whatever is best
    planned = RatedCandidate(best, 0.0, figures=evaluate(config, best))
    plan_command.write(config, Plan(planned, None, 1, 1), tmp_path)
    machines = [n for part in rollout_machines(config, best) for n in part.processes]
    assert best.trainer_gpus == 1 and sum(machines) == best.replicas == 3 and len(machines) == 2

    shared_memory = [Path("/dev/shm"), tmp_path]  # its device tells one machine from another
    assert shared_memory[0].stat().st_dev != tmp_path.stat().st_dev
    run_dir = tmp_path / "run"
    env = {**os.environ, "RUN_DIR": str(run_dir), "HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    parts = [("controller", 0), ("trainer", 0), *(("rollout", n) for n in range(len(machines)))]
    with open(tmp_path / "out", "w") as out:
        started = [
            subprocess.Popen(
                [
                    tmp_path / "kinds.sh",
                    role,
                    str(number),
                    *SMALL,
                    "steps=6",
                    f"relay.shm_dir={shared_memory[number]}",
                ],
                stdout=out,
                stderr=out,
                env=env,
                cwd=tmp_path,
            )
            for role, number in parts
        ]
        try:
            deadline = time.monotonic() + 300
            while any(process.poll() is None for process in started):
                failed = any(process.poll() for process in started)
                assert not failed and time.monotonic() < deadline, (tmp_path / "out").read_text()[-3000:]
                time.sleep(0.2)
        finally:
            for process in started:
                if process.poll() is None:
                    process.terminate()
                    process.wait(60)
    assert [process.returncode for process in started] == [0] * len(parts)
    lines = [json.loads(line) for line in Path(run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["replica"] for line in lines if line["kind"] == "pull"} == set(range(best.replicas))
    assert max(line["step"] for line in lines if line["kind"] == "step") == 6
    assert_clean(run_dir)
