"""A plan for one GPU, which trainer and engine share as in experiment=one_gpu: with how much of the trainer's
activations recomputed both fit, and what they do to each other's time.

Two processes on a GPU take turns, and it never idles while either has work. So a step takes what its training
and its generation take together, and both go on all the time where admission lets them: each at a share of
the GPU's rates that is its part of that work. On-policy one waits for the other, and has the GPU to itself.
"""

import dataclasses

from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.simulator.cost import faster
from laminar_hpc.simulator.plan_memory import shared_tokens
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.setup import SimulationSetup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_fit import RECOMPUTATIONS, fitting_trainer


def is_one_gpu(config: PlanConfig) -> bool:
    """Whether the pools have one GPU in all, and it may train."""
    return sum(pool.count for pool in config.pools) == 1 and not config.pools[0].only_generates


def shared_trainers(config: PlanConfig) -> dict[str, TrainerConfig]:
    """By recomputation the trainers that leave the engine a KV cache for the longest trajectory twice; of two
    that leave it all that may run at once the one that recomputes less."""
    w, gpu, found = config.workload, GPUS[config.pools[0].gpu], dict[str, TrainerConfig]()
    alone = fitting_trainer(MODELS[config.model], gpu, 1, w, config.lora)
    if alone is None:
        return found
    requests = min(config.max_concurrent, w.prompts_per_step * w.samples_per_prompt)
    for choice in RECOMPUTATIONS[RECOMPUTATIONS.index(alone.recompute_activations) :]:
        trainer = dataclasses.replace(alone, recompute_activations=choice, devices=[0])
        tokens = shared_tokens(config, gpu, trainer)
        if tokens >= 2 * w.longest:
            found[choice] = trainer
        if tokens >= requests * w.longest:
            break
    return found


def taking_turns(run: SimulationSetup) -> SimulationSetup:
    """The run on one GPU, of whose rates trainer and engine have the shares that their work asks for."""
    if run.rules.max_staleness == 0:
        return run
    figures = simulate(_shares(run, 0.5)).figures
    trains, generates = 1.0 - figures["trainer_wait_share"], 1.0 - figures["rollout_idle_share"]
    return _shares(run, trains / (trains + generates))


def _shares(run: SimulationSetup, trainer: float) -> SimulationSetup:
    engines = tuple(
        dataclasses.replace(kind, costs=faster(kind.costs, 1.0 - trainer)) for kind in run.engines
    )
    return dataclasses.replace(run, engines=engines, job=faster(run.job, trainer))
