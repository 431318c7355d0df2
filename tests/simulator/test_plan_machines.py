"""`laminar plan` on machines with another number of GPUs than eight."""

import pytest
import yaml

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator import plan, plan_command
from laminar_hpc.simulator.divisions import Candidate, candidates, trainer_settings
from laminar_hpc.simulator.plan_files import experiment, rollout_machines, trainer_machines
from laminar_hpc.simulator.settings import load_plan

SMALL = [
    "workload.prompts_per_step=32",
    "workload.samples_per_prompt=4",
    "workload.updates_per_step=4",
    "steps=3",
    "warmup_steps=1",
]


def test_machines_of_four_gpus(tmp_path):
    """Promise: no part of a plan asks a machine for more GPUs than the table gives it, whole or divided."""
    config = load_plan("node", [*SMALL, "pools=[{gpu: GB200, count: 8}]"])
    for candidate in candidates(config):
        trainers, rollouts = trainer_machines(config, candidate), rollout_machines(config, candidate)
        tp = candidate.tensor_parallel
        assert all(n * tp <= 4 for part in rollouts for n in part.processes) and max(trainers.processes) <= 4
        beside = [part for part in rollouts if part.beside]
        for part in beside:
            assert trainers.processes[0] + part.processes[0] * tp <= 4 and part.count <= trainers.count
        assert trainers.count + sum(part.count for part in rollouts if not part.beside) <= 2
    whole = next(candidate for candidate in candidates(config) if candidate.trainer_gpus == 4)
    planned = plan.RatedCandidate(whole, 0.0, figures=plan.evaluate(config, whole))
    lines = plan_command.write(config, plan.Plan(planned, None, 1, 1), tmp_path)
    assert any("2 machines of GB200 with gpus=4" in line for line in lines), "they are two machines, not one"
    with pytest.raises(LaminarError, match=r"count=6: machines have 4 GPUs: give a multiple"):
        load_plan("node", ["pools=[{gpu: GB200, count: 6}]"])


def test_replicas_stay_inside_a_machine(tmp_path):
    """Promise: of machines with six GPUs each replica is on one."""
    (tmp_path / "tables").mkdir()
    entry = "X6: {hbm: 3350, tflops: 989, memory: 80, nvlink: 450, nic: 43, pcie: 52, price: 2.5, machine: 6}"
    (tmp_path / "tables" / "gpus.yaml").write_text(entry)
    config = load_plan("node", [*SMALL, "--config-dir", str(tmp_path), "pools=[{gpu: X6, count: 12}]"])
    found = list(candidates(config))
    assert {candidate.trainer_gpus for candidate in found} == {4, 6, 8, 10}  # the last two as 4 and 5 on each
    assert {candidate.tensor_parallel for candidate in found} == {1, 2}
    for candidate in found:
        machines, trainers = rollout_machines(config, candidate), trainer_machines(config, candidate)
        assert sum(sum(part.processes) for part in machines) == candidate.replicas
        assert trainers.processes[0] % trainer_settings(config, candidate).tensor_parallel == 0
        for part in machines:
            free = 6 - trainers.processes[0] if part.beside else 6
            assert all(n * candidate.tensor_parallel <= free for n in part.processes)


def test_a_plan_of_several_turns_writes_their_limits():
    """Promise: turns, calls and the time limits that were simulated stand in the experiment file, what the
    tools were taken for in its comments; of one turn there is no such section."""
    words = ["workload.turns=6", "workload.turn_seconds=2.5", "workload.turn_tokens=300"]
    several, one = load_plan("node", words), load_plan("node", [])
    candidate = Candidate(0, 4, ((0, 4, 2),))
    figures = {"latency_max": 500.0, "step_seconds": 100.0}
    text = experiment(several, candidate, figures)
    found = yaml.safe_load(text)
    assert found["environment"] == {
        "max_turns": 6,
        "max_tool_calls": 6,
        "timeout_seconds": 30,
        "max_seconds": found["cluster"]["batch_timeout_seconds"],
    }
    assert "calls of 2.5 s (median)" in text and "300 tokens after each" in text
    assert "environment" not in yaml.safe_load(experiment(one, candidate, figures))
