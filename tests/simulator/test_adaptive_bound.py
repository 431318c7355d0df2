"""The staleness bound that follows who waits, in the simulator: it ends where a fixed one would have to be
set by hand, on either side."""

import dataclasses

import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import Simulation, without_collector
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.tables import GPUS, MODELS

WORK = WorkloadConfig(
    prompts_per_step=32,
    samples_per_prompt=4,
    updates_per_step=4,
    mean_response_tokens=800,
    max_response_tokens=8000,
)


def made(trainer_gpus: int, **rules: object) -> SimulationSetup:
    """7B, eight replicas; the more GPUs train, the more steps a long response is behind."""
    gpu, laminar = GPUS["H800"], dataclasses.replace(PIPELINES["laminar_auto"], **rules)
    return setup(
        laminar,
        MODELS["7B"],
        gpu,
        trainer_gpus,
        [(gpu, 8, 1, None)],
        WORK,
        DEFAULT,
        steps=60,
        warmup_steps=20,
    )


def simulated(setup: SimulationSetup) -> tuple[dict[str, float], Simulation]:
    with without_collector():
        simulation = Simulation(setup)
        simulation.clock.run()
        return simulation.outcome().figures, simulation


def test_it_rises_where_long_responses_hold_the_trainer_back():
    """A fast trainer beside long tails: with the bound that a run begins with it waits; the one that adapts
    brings nearly what the maximum brings, and each trajectory is trained within the bound of its weights."""
    fixed, _ = simulated(made(4, adaptive=False, max_staleness=2))
    most, _ = simulated(made(4, adaptive=False, max_staleness=8))
    auto, simulation = simulated(made(4))
    assert most["tokens_per_second"] > 1.05 * fixed["tokens_per_second"], "the case is one where it matters"
    assert auto["tokens_per_second"] > 0.95 * most["tokens_per_second"]
    bounds = simulation.trainer.bound.steps
    assert bounds is not None
    assert auto["staleness_training_max"] <= max(bounds.at(step) for step in range(61)) <= 8


def test_it_falls_where_data_only_age():
    """A slow trainer: a large bound lets the buffer fill and brings nothing; the one that adapts comes down
    to fresher data at the same speed."""
    most, _ = simulated(made(1, adaptive=False, max_staleness=8))
    auto, _ = simulated(made(1))
    assert auto["tokens_per_second"] > 0.98 * most["tokens_per_second"]
    assert auto["staleness_training_mean"] < most["staleness_training_mean"] - 2


@pytest.mark.parametrize("refresh", ["barrier", "interrupt", "versions"])
def test_every_pipeline_may_have_it(refresh):
    """It never leaves a run standing, and the maximum holds."""
    figures, _ = simulated(
        dataclasses.replace(made(4, refresh=refresh, max_staleness=3, repack="off"), steps=12, warmup_steps=2)
    )
    assert figures["staleness_training_max"] <= 3 or refresh == "interrupt"
