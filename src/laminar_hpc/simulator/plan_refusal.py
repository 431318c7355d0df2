"""What is said where a model fits on no division of the pools: what they lack, and what would fit, each tried
before it is named."""

import dataclasses
from collections.abc import Iterator

from laminar_hpc.config.families import FAMILIES
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.simulator.divisions import candidates, tensor_parallels
from laminar_hpc.simulator.lora import wrong_adapter
from laminar_hpc.simulator.one_gpu import is_one_gpu
from laminar_hpc.simulator.schema import PlanConfig, PoolConfig
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_fit import fitting_trainer

_RANK = 16  # of the adapter that is tried
_MORE = 64  # times the GPUs that are tried at most


def why_nothing_fits(config: PlanConfig) -> str:
    """What the pools lack: GPUs to train on, GPUs to generate on, or both at the same time."""
    cure = "add GPUs, take a smaller model, or lower workload.max_response_tokens" + _what_would_fit(config)
    model, pools = config.model, ", ".join(f"{pool.count} {pool.gpu}" for pool in config.pools)
    if is_one_gpu(config):
        return (
            f"plan: one GPU cannot be divided, and trainer and engine of {model} do not fit on {pools} "
            f"together, as in experiment=one_gpu; {cure}"
        )
    training = [pool for pool in config.pools if not pool.only_generates]
    trains = {pool.gpu: n for pool in training if (n := _least_trainer(config, pool))}
    generates = {pool.gpu: min(sizes) for pool in config.pools if (sizes := tensor_parallels(config, pool))}
    if trains and generates:
        to_train, to_generate = (
            " or ".join(f"{n} {gpu}" for gpu, n in needed.items()) for needed in (trains, generates)
        )
        return (
            f"plan: {model} fits on no division of {pools}: it needs at least {to_train} to train and "
            f"{to_generate} beside to generate; {cure}"
        )
    what = "generate" if trains else "train" if generates else "train or generate"
    kind = "pool"
    if what == "train" and any(pool.preemptible for pool in config.pools):
        kind = "pool that is not preemptible"
    elif what == "train" and any(pool.only_generates for pool in config.pools):
        kind = "pool without wan_gbps, which is where the trainer is,"
    return f"plan: {model} fits on no {kind} to {what} ({pools}); {cure}"


def _least_trainer(config: PlanConfig, pool: PoolConfig) -> int | None:
    """GPUs of the pool's type that train the model, looked for up to 64 machines."""
    model, machine = MODELS[config.model], GPUS[pool.gpu].machine
    sizes = [*range(1, machine), *(n * machine for n in (1, 2, 4, 8, 16, 32, 64))]
    return next(
        (n for n in sizes if fitting_trainer(model, GPUS[pool.gpu], n, config.workload, config.lora)), None
    )


def _what_would_fit(config: PlanConfig) -> str:
    """Of an adapter, the largest smaller model and the fewest more GPUs those that fit, each by itself."""
    options = (_with_adapter(config), _smaller(config), _more_gpus(config))
    words = [next(found, None) for found in options]
    fit = [word for word in words if word]
    return f"; what fits: {', or '.join(fit)}" if fit else ""


def _fits(config: PlanConfig) -> bool:
    return next(candidates(config), None) is not None


def _with_adapter(config: PlanConfig) -> Iterator[str]:
    changed = dataclasses.replace(config, lora=LoraConfig(rank=_RANK))
    if config.lora.rank == 0 and not wrong_adapter(MODELS[changed.model], changed.lora) and _fits(changed):
        yield f"lora.rank={_RANK}"


def _smaller(config: PlanConfig) -> Iterator[str]:
    """Of the same family first."""
    w, own = config.workload, MODELS[config.model]
    family = own.config["model_type"]
    known = [
        (each.config["model_type"] == family, each.parameters, name)
        for name, each in MODELS.items()
        if each.parameters < own.parameters
    ]
    for *_, name in sorted(known, reverse=True):
        shape, changed = MODELS[name].config, dataclasses.replace(config, model=name)
        planned = shape["model_type"] in FAMILIES and w.longest <= shape["max_position_embeddings"]
        if planned and not wrong_adapter(MODELS[changed.model], changed.lora) and _fits(changed):
            yield f"model={name}"


def _more_gpus(config: PlanConfig) -> Iterator[str]:
    """Of the first pool that may train."""
    for i, pool in enumerate(config.pools):
        count, machine = pool.count, GPUS[pool.gpu].machine
        while not pool.only_generates and (count := _next_count(count, machine)) <= _MORE * pool.count:
            more = dataclasses.replace(pool, count=count)
            if _fits(dataclasses.replace(config, pools=[*config.pools[:i], more, *config.pools[i + 1 :]])):
                yield f"{count} {pool.gpu}"


def _next_count(count: int, machine: int) -> int:
    """One more GPU within a machine, then twice as many machines."""
    return count + 1 if count < machine else 2 * count
