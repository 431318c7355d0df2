"""What a baseline is made of: staleness bounds of every kind, what holds up its trainer, slow replicas, and
places of trajectories that wait for an environment."""

import dataclasses

import pytest

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import EngineAdmission, SimulatedRequest
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import SimulationConfig, WorkloadConfig
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.sweep import rules_of
from laminar_hpc.simulator.tables import GPUS, MODELS

WORK = WorkloadConfig(
    prompts_per_step=64,
    samples_per_prompt=4,
    updates_per_step=4,
    mean_response_tokens=800,
    max_response_tokens=4000,
)


def small(pipeline: str, work: WorkloadConfig = WORK, **changes: object) -> SimulationSetup:
    """7B on four and eight H800, eight steps."""
    gpu = GPUS["H800"]
    made = setup(
        PIPELINES[pipeline], MODELS["7B"], gpu, 4, [(gpu, 8, 1, None)], work, DEFAULT, steps=8, warmup_steps=2
    )
    return dataclasses.replace(made, **changes)


def bounded(pipeline: str, bound: float) -> SimulationSetup:
    made = small(pipeline)
    return dataclasses.replace(made, rules=dataclasses.replace(made.rules, max_staleness=bound))


def stale_share(made: SimulationSetup) -> float:
    """Share of trajectories that are trained a step late."""
    counts = simulate(made).staleness_training
    assert max(counts) <= made.rules.whole_staleness
    return sum(n for late, n in counts.items() if late) / sum(counts.values())


@pytest.mark.parametrize("pipeline", ["laminar", "partial", "one_step", "stream", "dora"])
def test_half_a_step_of_staleness_is_half_a_batch(pipeline):
    """Promise: a bound of 0.5 lets at most half of each batch be a step late, as verl's staleness_threshold;
    the barrier of one-step and stream, which grants whole batches, stays at the whole step below."""
    if PIPELINES[pipeline].refresh == "interrupt":
        rates = [simulate(bounded(pipeline, b)).figures["tokens_per_second"] for b in (0.0, 0.5, 1.0)]
        assert rates[0] < rates[1] < rates[2]
        return
    none, half, whole = (stale_share(bounded(pipeline, bound)) for bound in (0.0, 0.5, 1.0))
    assert none == 0.0 and half <= 0.5 and half <= whole
    if PIPELINES[pipeline].refresh == "drained":
        assert half > 0.1


@pytest.mark.parametrize("pipeline", sorted(PIPELINES))
def test_the_configured_bound_is_that_of_every_pipeline_that_has_one(pipeline):
    """Promise: max_staleness=0 is not ignored by stream and one-step; sync has none to set."""
    bound = rules_of(SimulationConfig(max_staleness=0.0), pipeline).max_staleness
    assert bound == 0
    assert rules_of(SimulationConfig(max_staleness=2.0), pipeline).max_staleness == (
        0 if pipeline in ("sync", "sync_split") else 2
    )


def test_stream_at_staleness_zero_generates_only_with_the_newest_weights():
    """And is slower than with the step that it usually has."""
    slow, fast = (simulate(bounded("stream", bound)) for bound in (0.0, 1.0))
    assert set(slow.staleness_training) == {0}
    assert slow.figures["tokens_per_second"] < fast.figures["tokens_per_second"]


def test_a_batch_is_handled_during_training_where_the_real_system_does():
    """Without the handling a synchronous step is shorter by all of it, an asynchronous one by its rest."""
    for pipeline, share in (("sync_split", 1.0), ("laminar", 0.1)):
        made = small(pipeline)
        job = made.job
        free = dataclasses.replace(made, job=dataclasses.replace(job, handling=0.0, overlapped_handling=0.0))
        saved = simulate(made).figures["step_seconds"] - simulate(free).figures["step_seconds"]
        assert saved <= share * 256 * job.handling * 1.05


def test_slow_replicas_hurt_barriers_more_than_drained_replicas():
    """Promise: the spread of speeds costs the barrier its slowest replica."""
    lost = {}
    for pipeline in ("sync_split", "laminar"):
        even, spread = (
            simulate(small(pipeline, speed_spread=s)).figures["generated_per_second"] for s in (0.0, 0.2)
        )
        lost[pipeline] = 1 - spread / even
    assert lost["sync_split"] > lost["laminar"] + 0.03, lost


def test_a_trajectory_at_its_environment_gives_its_place_up():
    """Promise: as in a run max_concurrent counts no request that waits for its tools; it comes back behind
    those that wait for a place."""
    engine = SimulatedReplica(
        0, engine_costs(MODELS["7B"], GPUS["H800"], 1, DEFAULT), 1e6, 4, EngineAdmission.of(4096, DEFAULT), 1
    )
    requests = [SimulatedRequest(i, None, [100, 100], 50, 0) for i in range(8)]
    engine.waiting.extend(requests)
    engine.pending = 8
    engine.fill()
    assert len(engine.running) == 4 and not engine.place_free
    first = next(iter(engine.running.values()))
    engine.stop(first)
    engine.park(first)
    engine.away[first.trajectory_id] = first
    assert engine.occupied() == 3
    engine.fill()
    assert len(engine.running) == 4 and len(engine.waiting) == 3


def test_more_staleness_does_not_slow_environments_down():
    """Promise: with environments, more trajectories ahead are no more requests in an engine at once."""
    work = dataclasses.replace(WORK, turns=5, turn_seconds=5.0, turn_sigma=1.0, turn_tokens=100)
    rates = []
    for bound in (1.0, 4.0):
        made = small("partial", work, max_concurrent=32)
        made = dataclasses.replace(made, rules=dataclasses.replace(made.rules, max_staleness=bound))
        rates.append(simulate(made).figures["tokens_per_second"])
    assert rates[1] > 0.95 * rates[0], rates
