"""A finished run as a simulation, unchanged or with other settings, from what was measured in it."""

import dataclasses

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.simulator.cost import EngineCosts, faster
from laminar_hpc.simulator.finished.measured import (
    SPLIT,
    WARMUP_STEPS,
    Figures,
    Measured,
    Split,
    repack_requests,
)
from laminar_hpc.simulator.rules import Rules
from laminar_hpc.simulator.run import SimulationOutcome, simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.setup import Engines, SimulationSetup
from laminar_hpc.simulator.trainer_cost import JobCosts, only_training
from laminar_hpc.simulator.trainer_fit import layout_of


def setup_of(measured: Measured, config: RunConfig | None = None) -> SimulationSetup:
    """The run with its own configuration, or with another one that has the same model and work. Another
    number of replicas gets the speeds of those that there were, in turn; another number of data-parallel
    ranks the same seconds per token on each."""
    config = config or measured.config
    p, r = config.pipeline, config.rollout
    kinds = [
        Engines(
            1,
            r.tensor_parallel,
            faster(_engine_costs(measured), measured.speeds[i % len(measured.speeds)]),
            r.kv_cache_tokens,
            repack_requests(measured),
        )
        for i in range(r.most)
    ]
    t, was, turns = config.trainer, measured.config, measured.turns
    repack = "off" if config.environment.stays else p.repack
    live = (p.refresh, p.staleness_max, p.consumption, p.keep_kv, repack)
    rules = Rules(*live, relays=True, isolated=True, overlapped=True, adaptive=p.adapts_staleness)
    workload = WorkloadConfig(
        prompts_per_step=was.algorithm.prompts_per_step,
        samples_per_prompt=was.algorithm.samples_per_prompt,
        updates_per_step=was.algorithm.minibatches_per_step,
        prompt_tokens=measured.queue.prompt_tokens,
        max_response_tokens=was.sampling.max_response_tokens,
    )
    return SimulationSetup(
        rules,
        tuple(kinds),
        _job_costs(measured, config),
        t.ranks,
        layout_of(t),
        workload,
        steps=measured.steps,
        warmup_steps=WARMUP_STEPS,
        admission=measured.queue.admission,
        max_concurrent=r.max_concurrent,
        checkpoint_every=config.checkpoint.every,
        equal_batches=True,
        local_batch_groups=p.local_batch_groups,
        ends=True,
        lengths=measured.lengths,
        known=turns.known if turns else None,
        limits=config.environment if turns else None,
    )


def predict(measured: Measured, config: RunConfig | None = None) -> Figures:
    """Figures of the simulated run."""
    return figures_of(simulate(setup_of(measured, config)))


def figures_of(outcome: SimulationOutcome) -> Figures:
    """The figures that a live run has too."""
    found, rollout = outcome.figures, outcome.gpu_seconds["rollout"]
    # a replica whose trajectories wait for their tools is in the middle of its local batch, as in a run
    at_tools = rollout.get("environment", 0.0) / sum(rollout.values())
    return Figures(
        found["tokens_per_second"],
        found["step_seconds"],
        found["trainer_wait_share"],
        found["rollout_idle_share"] - at_tools,
        found["staleness_training_mean"],
        Split.of([found.get(f"{kind}_seconds_mean") for kind in SPLIT]),
    )


def _engine_costs(measured: Measured) -> EngineCosts:
    """What a local batch took beside its steps counts as the prefill of its prompts, one per group."""
    c, curve = measured.config, measured.curve
    groups = c.pipeline.local_batch_groups or -(-c.algorithm.prompts_per_step // c.rollout.most)
    prefill = curve.prefill + curve.start / (groups * measured.queue.prompt_tokens)
    pull, move = measured.pull, measured.move
    return dataclasses.replace(curve.costs(prefill), pull=pull, global_sync=pull, move_latency=move)


def _job_costs(measured: Measured, config: RunConfig) -> JobCosts:
    costs = measured.trainer
    return dataclasses.replace(
        only_training(costs.token / config.trainer.data_parallel),
        update=costs.step / config.algorithm.minibatches_per_step,
        publish_stall=costs.publish,
        chain=costs.relay,
        checkpoint=costs.checkpoint,
        repack_period=config.pipeline.repack_seconds,
        score=measured.score,
    )
