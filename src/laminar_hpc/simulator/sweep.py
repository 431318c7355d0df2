"""Each pipeline of an experiment at each number of GPUs, with the known split or the best of a few."""

import dataclasses
from collections.abc import Callable

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.policies.sizing import trainer_splits
from laminar_hpc.simulator.constants import GPUS, MODELS
from laminar_hpc.simulator.rules import PIPELINES, Rules
from laminar_hpc.simulator.run import Outcome, simulate
from laminar_hpc.simulator.schema import SimulationConfig
from laminar_hpc.simulator.settings import constants_of
from laminar_hpc.simulator.setup import setup

_SEARCH_STEPS = 3  # beyond the warm-up, while splits are compared


def rules_of(config: SimulationConfig, pipeline: str) -> Rules:
    """The pipeline's rules, with the configuration's staleness bound unless the pipeline is synchronous."""
    rules = PIPELINES[pipeline]
    if config.max_staleness is not None and rules.refresh != "barrier":
        rules = dataclasses.replace(rules, max_staleness=config.max_staleness)
    return rules


def point(
    config: SimulationConfig, pipeline: str, gpus: int, trainer_gpus: int, steps: int, watch: bool = False
) -> Outcome:
    """One simulated run."""
    model, rules, c = MODELS[config.model], rules_of(config, pipeline), constants_of(config)
    rollout_gpus = gpus if rules.placement == "colocated" else gpus - trainer_gpus
    replica_mtbf, trainer_mtbf = (
        hours and hours * 3600 for hours in (config.rollout_mtbf_hours, config.trainer_mtbf_hours)
    )
    return simulate(
        setup(
            rules,
            model,
            GPUS[config.trainer_gpu],
            trainer_gpus,
            [
                (
                    GPUS[config.rollout_gpu],
                    rollout_gpus,
                    config.tensor_parallel or model.tensor_parallel,
                    replica_mtbf,
                )
            ],
            config.workload,
            c,
            engine=config.engine,
            steps=steps,
            warmup_steps=config.warmup_steps,
            seed=config.seed,
            max_concurrent=config.max_concurrent,
            checkpoint_every=config.checkpoint_every,
            watch=watch,
            trainer_mtbf=trainer_mtbf,
        )
    )


def split(config: SimulationConfig, pipeline: str, gpus: int) -> int:
    """The trainer's GPUs: known, or the best of a few shares by a short run each."""
    if rules_of(config, pipeline).placement == "colocated":
        return gpus
    tensor_parallel = config.tensor_parallel or MODELS[config.model].tensor_parallel
    share = config.splits.get(f"{pipeline}@{gpus}", config.splits.get(pipeline, config.trainer_share))
    if share is not None:
        trainer = round(gpus * share / tensor_parallel) * tensor_parallel
        if not 0 < trainer <= gpus - tensor_parallel:
            raise LaminarError(
                f"{pipeline} at {gpus} GPUs: a trainer share of "
                f"{share:g} leaves no GPUs to train or to generate"
            )
        return trainer
    steps = min(config.steps, config.warmup_steps + _SEARCH_STEPS)
    candidates = trainer_splits(gpus, tensor_parallel)
    rates = {n: point(config, pipeline, gpus, n, steps).figures["tokens_per_second"] for n in candidates}
    return max(candidates, key=lambda n: rates[n])


def sweep(config: SimulationConfig, say: Callable[[str], None] = lambda line: None) -> list[dict]:
    """Rows of pipeline, gpus and the outcome; `say` is told of each."""
    rows = []
    for gpus in config.gpus:
        for pipeline in config.pipelines:
            trainer_gpus = split(config, pipeline, gpus)
            outcome = point(config, pipeline, gpus, trainer_gpus, config.steps, watch=True)
            say(f"{pipeline} on {gpus} GPUs: {outcome.figures['tokens_per_second']:,.0f} tokens/s")
            rows.append({"pipeline": pipeline, "gpus": gpus, "outcome": outcome})
    return rows
