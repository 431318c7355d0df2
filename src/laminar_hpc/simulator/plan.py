"""`laminar plan`: how to divide a cluster between trainer, relays and rollouts, by best-first search over the
simulator.

Each candidate has an optimistic score from closed forms (no rate of the simulation can exceed it); candidates
are simulated in its order, and the search ends when the best simulated score is above all that is left.
Candidates are what one experiment file can say and `laminar train` can start: the trainer on one pool that is
not preemptible, in whole machines, or on a part of the only machine; replicas of one TP, KV cache and local
batch on what is left of each pool, on all of it or none, with `objective=cost` also on a part of it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.cost import engine_costs, kv_capacity
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import PlanConfig, PoolConfig
from laminar_hpc.simulator.setup import rollout_of, setup
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import job_costs
from laminar_hpc.simulator.trainer_fit import fitting_trainer, layout_of, serves
from laminar_hpc.simulator.workload import Workload

_GROUPS = 256  # whose lengths the closed forms use
_SLACK = 1.05  # the closed forms use mean lengths; a short simulation may see shorter ones
_PARTS = 4  # with objective=cost a pool's rollouts are taken by quarters
_CANDIDATES = 100_000  # whose bounds are computed in a few seconds
_SIMULATED = 200  # candidates, of a second or so each


@dataclass(frozen=True)
class Candidate:
    """`rollouts`: (pool index, GPUs, tensor parallel), of one tensor parallel size."""

    trainer_pool: int
    trainer_gpus: int
    rollouts: tuple[tuple[int, int, int], ...]

    @property
    def tensor_parallel(self) -> int:
        return self.rollouts[0][2]

    @property
    def replicas(self) -> int:
        return sum(gpus // tp for _, gpus, tp in self.rollouts)


@dataclass
class RatedCandidate:
    """`score`: tokens/s, or tokens per $ with objective=cost. `bound`: what it could be at most. `figures`:
    None before it is simulated."""

    candidate: Candidate
    bound: float
    score: float = -math.inf
    price: float = 0.0
    figures: dict | None = None
    why_not: str = ""


@dataclass
class Plan:
    best: RatedCandidate
    runner_up: RatedCandidate | None
    simulated: int
    candidates: int
    ended: bool = True  # no other candidate can be better; false: the search was cut off


def price(config: PlanConfig, candidate: Candidate) -> float:
    """$ per hour of all GPUs in use."""
    per_gpu = [pool.price if pool.price is not None else GPUS[pool.gpu].price for pool in config.pools]
    return candidate.trainer_gpus * per_gpu[candidate.trainer_pool] + sum(
        gpus * per_gpu[pool] for pool, gpus, _ in candidate.rollouts
    )


def tensor_parallels(config: PlanConfig, pool: PoolConfig) -> list[int]:
    """The smallest three TPs within a machine at which model and longest trajectory fit."""
    model, tokens_min = MODELS[config.model], 2 * config.workload.longest
    machine = min(pool.count, GPUS[pool.gpu].machine)
    return [
        tp
        for tp in (1, 2, 4, 8)
        if tp <= machine
        and (machine == pool.count or machine % tp == 0)
        and serves(model, tp)
        and kv_capacity(model, GPUS[pool.gpu], tp, DEFAULT.kv_memory_share) >= tokens_min
    ][:3]


def trainer_sizes(config: PlanConfig, pool: PoolConfig) -> list[int]:
    """GPUs of `pool` that a trainer may take: whole machines. A part of a machine only where there is no
    other one: a rollout beside the trainer needs one world with both."""
    machine = GPUS[pool.gpu].machine
    if pool.count > machine:
        return list(range(machine, pool.count + 1, machine))
    return list(range(1, pool.count)) if len(config.pools) == 1 else [pool.count]


def trainer_of(config: PlanConfig, pool: int, gpus: int) -> TrainerConfig | None:
    """The trainer's settings on `gpus` of the pool; None where the model does not fit."""
    return fitting_trainer(MODELS[config.model], GPUS[config.pools[pool].gpu], gpus, config.workload)


def trainer_settings(config: PlanConfig, candidate: Candidate) -> TrainerConfig:
    """Raises LaminarError when the model cannot be trained on the candidate's GPUs."""
    trainer = trainer_of(config, candidate.trainer_pool, candidate.trainer_gpus)
    if trainer is None:
        gpu = config.pools[candidate.trainer_pool].gpu
        raise LaminarError(f"plan: {config.model} cannot be trained on {candidate.trainer_gpus} {gpu}")
    return trainer


def kv_cache_tokens(config: PlanConfig, candidate: Candidate) -> int:
    """KV tokens of every replica: one experiment file has one number, so that of the smallest GPUs."""
    model = MODELS[config.model]
    return min(
        kv_capacity(model, GPUS[config.pools[pool].gpu], tp, DEFAULT.kv_memory_share)
        for pool, _, tp in candidate.rollouts
    )


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
    parallel = [tensor_parallels(config, pool) for pool in config.pools]
    for index, pool in enumerate(config.pools):
        for trainer in [] if pool.only_generates else trainer_sizes(config, pool):
            if trainer_of(config, index, trainer) is None:
                continue
            for tp in sorted({tp for sizes in parallel for tp in sizes}):
                choices = [
                    sorted(_amounts(config, other.count - (trainer if i == index else 0), tp))
                    if tp in parallel[i]
                    else [0]
                    for i, other in enumerate(config.pools)
                ]
                for chosen in itertools.product(*choices):
                    if rollouts := tuple((i, gpus, tp) for i, gpus in enumerate(chosen) if gpus):
                        yield Candidate(index, trainer, rollouts)


def _amounts(config: PlanConfig, left: int, tp: int) -> set[int]:
    """GPUs of a pool with `left` ones that replicas may take."""
    parts = range(_PARTS + 1) if config.objective == "cost" else (0, _PARTS)
    return {left * part // _PARTS // tp * tp for part in parts}


def bound(
    config: PlanConfig, candidate: Candidate, mean: float, context: float, c: Constants = DEFAULT
) -> float:
    """Tokens/s (prompts included) that neither side can exceed: the trainer's FLOPs, and decoding with full
    batches all the time.

    `mean`: response tokens; `context`: mean tokens before a generated token.
    """
    model, w = MODELS[config.model], config.workload
    rollout_gpus = sum(gpus for _, gpus, _ in candidate.rollouts)
    gpu = GPUS[config.pools[candidate.trainer_pool].gpu]
    layout = layout_of(trainer_settings(config, candidate))
    job = job_costs(model, gpu, candidate.trainer_gpus, layout, rollout_gpus, w.max_response_tokens, DEFAULT)
    # Attention of the mean length: no more than that of the lengths (mean of squares), so the bound stays
    # one.
    mean_tokens = mean + w.prompt_tokens
    train = 1.0 / (
        job.train_token
        + job.logprob_token
        + (job.train_attention + job.logprob_attention) * mean_tokens
        + job.overlapped_handling / mean_tokens
    )
    generate, capacity = 0.0, kv_cache_tokens(config, candidate)
    for pool, gpus, tp in candidate.rollouts:
        gpu = GPUS[config.pools[pool].gpu]
        costs = engine_costs(model, gpu, tp, DEFAULT)
        batch = min(config.max_concurrent, capacity / context)
        generate += gpus // tp * batch / costs.step(batch, batch * context)
    generate *= 1.0 + 2.0 * DEFAULT.replica_speed_spread  # of a few replicas all may be fast ones
    return _SLACK * min(train, generate * (mean + w.prompt_tokens) / mean)


def evaluate(config: PlanConfig, candidate: Candidate) -> dict:
    """Figures of a simulated run of it."""
    rollouts = [rollout_of(config.pools[pool], gpus, tp) for pool, gpus, tp in candidate.rollouts]
    pool = config.pools[candidate.trainer_pool]
    hours, machines = pool.mtbf_hours, max(1, candidate.trainer_gpus // GPUS[pool.gpu].machine)
    trainer_mtbf = hours and hours * 3600 / machines
    rules = dataclasses.replace(
        PIPELINES["laminar"], max_staleness=config.max_staleness, repack=repack_of(config, candidate)
    )
    run = setup(
        rules,
        MODELS[config.model],
        GPUS[pool.gpu],
        candidate.trainer_gpus,
        rollouts,
        config.workload,
        DEFAULT,
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        seed=config.seed,
        max_concurrent=config.max_concurrent,
        trainer_mtbf=trainer_mtbf,
        layout=layout_of(trainer_settings(config, candidate)),
        equal_batches=True,
    )
    capacity = kv_cache_tokens(config, candidate)
    kinds = tuple(dataclasses.replace(kind, capacity=capacity) for kind in run.engines)
    return simulate(dataclasses.replace(run, engines=kinds)).figures


def judge(config: PlanConfig, planned: RatedCandidate) -> None:
    """Score of a simulated candidate; -inf when it leaves the trainer idle beyond what `trainer_busy` allows
    or is slower than `least_throughput` (objective=cost only)."""
    assert planned.figures is not None
    rate = planned.figures["tokens_per_second"]
    planned.score = rate if config.objective == "throughput" else rate * 3600 / planned.price
    busy = 1.0 - planned.figures["trainer_wait_share"]
    if config.objective == "cost" and busy < config.trainer_busy:
        planned.why_not = f"the trainer is busy for {busy:.0%} of the time only"
    if config.objective == "cost" and rate < config.least_throughput:
        planned.why_not = f"fewer than {config.least_throughput:,.0f} tokens/s"
    if planned.why_not:
        planned.score = -math.inf


def search(
    config: PlanConfig, say: Callable[[str], None] = lambda line: None, c: Constants = DEFAULT
) -> Plan:
    """Raises LaminarError when nothing fits or nothing keeps the trainer busy."""
    lengths = _lengths(config)
    mean = sum(lengths) / len(lengths)
    context = config.workload.prompt_tokens + sum(n * n for n in lengths) / (2 * sum(lengths))
    options = []
    for candidate in itertools.islice(candidates(config), _CANDIDATES + 1):
        rate, cost = bound(config, candidate, mean, context), price(config, candidate)
        options.append(
            RatedCandidate(
                candidate, rate if config.objective == "throughput" else rate * 3600 / cost, price=cost
            )
        )
    if not options:
        raise LaminarError(why_nothing_fits(config))
    if len(options) > _CANDIDATES:
        raise LaminarError(
            f"plan: more than {_CANDIDATES:,} ways to divide these pools; ask with fewer or smaller ones"
        )
    options.sort(key=lambda planned: -planned.bound)
    best: RatedCandidate | None = None
    tried: list[RatedCandidate] = []
    for planned in options:
        if (best is not None and planned.bound <= best.score) or len(tried) == _SIMULATED:
            break
        planned.figures = evaluate(config, planned.candidate)
        judge(config, planned)
        tried.append(planned)
        say(
            f"{describe(config, planned.candidate)}: "
            f"{planned.figures['tokens_per_second']:,.0f} tokens/s {planned.why_not}"
        )
        if planned.score > (best.score if best else -math.inf):
            best = planned
    ended = len(tried) == len(options) or (best is not None and options[len(tried)].bound <= best.score)
    if best is None or best.score == -math.inf:
        least = f" and reaches {config.least_throughput:,.0f} tokens/s" if config.least_throughput else ""
        raise LaminarError(
            f"plan: no part of the pools keeps the trainer busy for {config.trainer_busy:.0%}{least}; lower "
            f"trainer_busy{' or least_throughput' if least else ''} or add rollout GPUs"
        )
    others = sorted((planned for planned in tried if planned is not best), key=lambda planned: -planned.score)
    return Plan(best, others[0] if others else None, len(tried), len(options), ended)


def _lengths(config: PlanConfig) -> list[int]:
    """Response tokens of groups that the figures are of, evenly spread: a run's may grow or shrink."""
    groups = config.workload.prompts_per_step
    first, end = config.warmup_steps * groups, config.steps * groups
    work = Workload(config.workload, config.seed, end)
    return [n for index in range(first, end, -(-(end - first) // _GROUPS)) for n in work.lengths(index)]


def why_nothing_fits(config: PlanConfig) -> str:
    """What the pools lack: GPUs to train on, GPUs to generate on, or both at the same time."""
    cure = "add GPUs, take a smaller model, or lower workload.max_response_tokens"
    model, pools = config.model, ", ".join(f"{pool.count} {pool.gpu}" for pool in config.pools)
    trains = {
        pool.gpu: n for pool in config.pools if not pool.only_generates and (n := _min_trainer(config, pool))
    }
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


def _min_trainer(config: PlanConfig, pool: PoolConfig) -> int | None:
    """GPUs of the pool's type that train the model, looked for up to 64 machines."""
    machine = GPUS[pool.gpu].machine
    sizes = [*range(1, machine), *(n * machine for n in (1, 2, 4, 8, 16, 32, 64))]
    return next(
        (n for n in sizes if fitting_trainer(MODELS[config.model], GPUS[pool.gpu], n, config.workload)), None
    )


def describe(config: PlanConfig, candidate: Candidate) -> str:
    """A placement in one line."""
    rollouts = ", ".join(
        f"{gpus // tp} replica{'s' if gpus > tp else ''} of TP{tp} on {gpus} {config.pools[pool].gpu}"
        for pool, gpus, tp in candidate.rollouts
    )
    return f"train on {candidate.trainer_gpus} {config.pools[candidate.trainer_pool].gpu}; {rollouts}"
