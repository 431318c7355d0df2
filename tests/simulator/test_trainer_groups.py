"""Several trainer groups of one policy: what couples them, and what all of them together cost."""

import dataclasses

import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.groups import exchange_seconds, simulate_groups
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.tables import GPUS, MODELS


def made(seed: int = 0) -> SimulationSetup:
    gpu = GPUS["H800"]
    work = WorkloadConfig(
        prompts_per_step=16, samples_per_prompt=4, updates_per_step=2, max_response_tokens=4000
    )
    return setup(
        PIPELINES["laminar"],
        MODELS["7B"],
        gpu,
        4,
        [(gpu, 4, 1, None)],
        work,
        DEFAULT,
        steps=5,
        warmup_steps=1,
        seed=seed,
    )


def test_one_group_is_a_run():
    """Promise: a single group is the run itself, but for the events of its exchanges with nobody."""
    alone, group = simulate(made()), simulate_groups(made(), 1, 0.0)
    assert group.figures.pop("events") == alone.figures.pop("events") + 5
    assert group == alone


def test_groups_wait_for_the_slowest_and_for_the_exchange():
    """Promise: all groups end a step at the same time, which is never before the slowest of them alone."""
    coupled = simulate_groups(made(), 4, 2.0)
    together = coupled.figures
    alone = [simulate(made(1_000_003 * number)).figures for number in range(4)]
    assert together["gpus"] == 4 * alone[0]["gpus"] and together["replicas"] == 16
    assert together["seconds"] >= max(figures["seconds"] for figures in alone)
    assert together["tokens_per_second"] < sum(figures["tokens_per_second"] for figures in alone)
    # groups x GPUs x seconds x steps after the warm-up
    assert coupled.gpu_seconds["trainer"]["exchange"] >= 4 * 4 * 2.0 * 4


def test_the_cost_is_that_of_the_groups_one_by_one():
    """Promise: as many events for each of many groups as for each of a few."""
    four, sixteen = (simulate_groups(made(), n, 0.0).figures["events"] for n in (4, 16))
    assert sixteen == pytest.approx(4 * four, rel=0.15)


def test_an_exchange_takes_twice_the_weights():
    """Reduce-scatter and all-gather in float32; one group exchanges nothing."""
    slow = dataclasses.replace(DEFAULT, group_exchange_bytes_per_second=1e9)
    assert exchange_seconds(MODELS["7B"], 1, slow) == 0.0
    assert exchange_seconds(MODELS["7B"], 2, slow) == pytest.approx(4 * MODELS["7B"].parameters / 1e9)
