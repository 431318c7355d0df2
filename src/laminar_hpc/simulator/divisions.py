"""How a cluster can be divided between trainer and rollouts: what one experiment file can say and `laminar
train` can start.

The trainer is on one pool that is not preemptible, on as few machines as hold it and as many GPUs on each;
replicas of one TP, KV cache and local batch are on what is left of each pool, beside the trainer too, on all
of it or none, with `objective=cost` also on a part of it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.simulator.one_gpu import is_one_gpu, shared_trainers
from laminar_hpc.simulator.plan_memory import engine_tokens, shared_tokens
from laminar_hpc.simulator.schema import PlanConfig, PoolConfig
from laminar_hpc.simulator.tables import GPUS, MODELS, Gpu
from laminar_hpc.simulator.trainer_fit import fitting_trainer, serves

RECOMPUTED = {"selective": "norms and gates recomputed", "full": "activations recomputed"}
_PARTS = 4  # with objective=cost a pool's rollouts are taken by quarters


@dataclass(frozen=True)
class Candidate:
    """`rollouts`: (pool index, GPUs, tensor parallel), of one tensor parallel size. `shared`: trainer and
    replica are on the same GPU, and this is the trainer's recomputation there."""

    trainer_pool: int
    trainer_gpus: int
    rollouts: tuple[tuple[int, int, int], ...]
    shared: str = ""

    @property
    def tensor_parallel(self) -> int:
        return self.rollouts[0][2]

    @property
    def replicas(self) -> int:
        return sum(gpus // tp for _, gpus, tp in self.rollouts)


def price(config: PlanConfig, candidate: Candidate) -> float:
    """$ per hour of all GPUs in use."""
    per_gpu = [pool.price if pool.price is not None else GPUS[pool.gpu].price for pool in config.pools]
    beside = () if candidate.shared else candidate.rollouts
    return candidate.trainer_gpus * per_gpu[candidate.trainer_pool] + sum(
        gpus * per_gpu[pool] for pool, gpus, _ in beside
    )


def tensor_parallels(config: PlanConfig, pool: PoolConfig) -> list[int]:
    """The smallest three TPs within a machine at which model and longest trajectory fit."""
    model, tokens_min = MODELS[config.model], 2 * config.workload.longest
    machine = machine_size(pool)
    return [
        tp
        for tp in (1, 2, 4, 8)
        if tp <= machine
        and (machine == pool.count or machine % tp == 0)
        and serves(model, tp)
        and engine_tokens(config, GPUS[pool.gpu], tp) >= tokens_min
    ][:3]


def machine_size(pool: PoolConfig) -> int:
    """GPUs of one machine of the pool."""
    return min(GPUS[pool.gpu].machine, pool.count)


def trainer_spread(pool: PoolConfig, gpus: int) -> tuple[int, int]:
    """The fewest machines of the pool that hold a trainer of so many GPUs, and its GPUs on each of them."""
    machines = -(-gpus // machine_size(pool))
    return machines, gpus // machines


def trainer_sizes(pool: PoolConfig) -> list[int]:
    """GPUs of the pool that a trainer may take: as many on each of its machines, as a run starts them."""
    sizes = range(1, pool.count + 1)
    return [n for n in sizes if n == math.prod(trainer_spread(pool, n))]


def trainer_gpu(config: PlanConfig, pool: int, gpus: int) -> Gpu:
    """The GPU type of a trainer of so many GPUs: a machine of it has those that the trainer uses."""
    machines, each = trainer_spread(config.pools[pool], gpus)
    gpu = GPUS[config.pools[pool].gpu]
    return dataclasses.replace(gpu, machine=each) if machines > 1 else gpu


def trainer_of(config: PlanConfig, pool: int, gpus: int) -> TrainerConfig | None:
    """The trainer's settings on `gpus` of the pool; None where the model does not fit."""
    gpu = trainer_gpu(config, pool, gpus)
    return fitting_trainer(MODELS[config.model], gpu, gpus, config.workload, config.lora)


def trainer_settings(config: PlanConfig, candidate: Candidate) -> TrainerConfig:
    """Raises LaminarError when the model cannot be trained on the candidate's GPUs."""
    if candidate.shared:
        return shared_trainers(config)[candidate.shared]
    trainer = trainer_of(config, candidate.trainer_pool, candidate.trainer_gpus)
    if trainer is None:
        gpu = config.pools[candidate.trainer_pool].gpu
        raise LaminarError(f"plan: {config.model} cannot be trained on {candidate.trainer_gpus} {gpu}")
    return trainer


def kv_cache_tokens(config: PlanConfig, candidate: Candidate) -> int:
    """KV tokens of every replica: one experiment file has one number, so that of the smallest GPUs."""
    gpus = [GPUS[config.pools[pool].gpu] for pool, *_ in candidate.rollouts]
    if candidate.shared:
        return shared_tokens(config, gpus[0], trainer_settings(config, candidate))
    return min(engine_tokens(config, gpu, candidate.tensor_parallel, candidate.replicas) for gpu in gpus)


def away(config: PlanConfig, candidate: Candidate) -> list[PoolConfig]:
    """Pools of the candidate's rollouts that are in other places than the trainer."""
    pools = [config.pools[pool] for pool, *_ in candidate.rollouts]
    return [pool for pool in pools if pool.wan_gbps is not None]


def repack_of(config: PlanConfig, candidate: Candidate) -> str:
    """Whether repack moves requests: where it pays, if there is another replica to move them to. A run knows
    nothing of places, so there is no repack where KV caches would cross wide-area links."""
    places = len(away(config, candidate)) + (len(candidate.rollouts) > len(away(config, candidate)))
    return "off" if candidate.replicas == 1 or places > 1 else "auto"


def candidates(config: PlanConfig) -> Iterator[Candidate]:
    """Every placement that fits: trainer's pool and size, and the replicas of each pool."""
    if is_one_gpu(config):
        yield from (Candidate(0, 1, ((0, 1, 1),), choice) for choice in shared_trainers(config))
        return
    parallel = [tensor_parallels(config, pool) for pool in config.pools]
    for index, pool in enumerate(config.pools):
        for trainer in [] if pool.only_generates else trainer_sizes(pool):
            if trainer_of(config, index, trainer) is None:
                continue
            for tp in sorted({tp for sizes in parallel for tp in sizes}):
                choices = [
                    sorted(_amounts(config, sum(rooms(other, trainer if i == index else 0, tp)), tp))
                    if tp in parallel[i]
                    else [0]
                    for i, other in enumerate(config.pools)
                ]
                for chosen in itertools.product(*choices):
                    if rollouts := tuple((i, gpus, tp) for i, gpus in enumerate(chosen) if gpus):
                        yield Candidate(index, trainer, rollouts)


def rooms(pool: PoolConfig, trainer: int, tp: int) -> list[int]:
    """GPUs of each machine of the pool that replicas of `tp` may take beside a trainer of so many GPUs: whole
    machines first, then those of the trainer."""
    machine = machine_size(pool)
    machines, each = trainer_spread(pool, trainer) if trainer else (0, 0)
    whole = [machine // tp * tp] * (pool.count // machine - machines)
    return [*whole, *[(machine - each) // tp * tp] * machines]


def _amounts(config: PlanConfig, room: int, tp: int) -> set[int]:
    """GPUs of a pool with room for so many that replicas may take."""
    parts = range(_PARTS + 1) if config.objective == "cost" else (0, _PARTS)
    return {room * part // _PARTS // tp * tp for part in parts}


def describe(config: PlanConfig, candidate: Candidate) -> str:
    """A placement in one line."""
    if candidate.shared:
        kept = RECOMPUTED.get(candidate.shared, "activations kept")
        return f"1 {config.pools[candidate.trainer_pool].gpu}, which trainer ({kept}) and 1 replica share"
    rollouts = ", ".join(
        f"{gpus // tp} replica{'s' if gpus > tp else ''} of TP{tp} on {gpus} {config.pools[pool].gpu}"
        for pool, gpus, tp in candidate.rollouts
    )
    return f"train on {candidate.trainer_gpus} {config.pools[candidate.trainer_pool].gpu}; {rollouts}"
