"""`laminar plan`: how to divide a cluster between trainer, relays and rollouts, by best-first search over the simulator.

Each candidate has an optimistic score from closed forms (no rate of the simulation can exceed it); candidates are simulated in its order,
and the search ends when the best simulated score is above all that is left. Candidates: the trainer on one pool that is not preemptible, in
machines; replicas of every fitting TP on what is left of each pool; with `objective=cost` also on a part of it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator.constants import DEFAULT, GPUS, GPUS_PER_MACHINE, MODELS, Constants
from laminar_hpc.simulator.cost import Layout, engine_costs, job_costs, kv_capacity, trainer_layout
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import setup, simulate
from laminar_hpc.simulator.schema import PlanConfig, PoolConfig
from laminar_hpc.simulator.workload import Workload

_SLACK = 1.05  # the closed forms use mean lengths; a short simulation may see shorter ones
_PARTS = 4  # with objective=cost a pool's rollouts are taken by quarters


@dataclass(frozen=True)
class Candidate:
    """`rollouts`: (pool index, GPUs, tensor parallel)."""

    trainer_pool: int
    trainer_gpus: int
    rollouts: tuple[tuple[int, int, int], ...]


@dataclass
class Planned:
    """`score`: tokens/s, or tokens per $ with objective=cost. `bound`: what it could be at most. `figures`: None before it is simulated."""

    candidate: Candidate
    bound: float
    score: float = -math.inf
    price: float = 0.0
    figures: dict | None = None
    why_not: str = ""


@dataclass
class Plan:
    best: Planned
    runner_up: Planned | None
    simulated: int
    candidates: int


def price(config: PlanConfig, candidate: Candidate) -> float:
    """$ per hour of all GPUs in use."""
    per_gpu = [pool.price if pool.price is not None else GPUS[pool.gpu].price for pool in config.pools]
    return candidate.trainer_gpus * per_gpu[candidate.trainer_pool] + sum(gpus * per_gpu[pool] for pool, gpus, _ in candidate.rollouts)


def tensor_parallels(config: PlanConfig, pool: PoolConfig, c: Constants) -> list[int]:
    """TPs within a machine at which the model and the longest trajectory fit; the smallest three, as more only adds exchanges."""
    longest = config.workload.longest
    model = MODELS[config.model]
    return [tp for tp in (1, 2, 4, 8) if tp <= pool.count and kv_capacity(model, GPUS[pool.gpu], tp, c.kv_memory_share) >= 2 * longest][:3]


def candidates(config: PlanConfig, c: Constants = DEFAULT) -> Iterator[Candidate]:
    model = MODELS[config.model]
    parallel = [tensor_parallels(config, pool, c) for pool in config.pools]
    for index, pool in enumerate(config.pools):
        if pool.preemptible:
            continue
        step = min(GPUS_PER_MACHINE, pool.count)
        for trainer in range(step, pool.count + 1, step):
            if trainer_layout(model, GPUS[pool.gpu], trainer, c) is None:
                continue
            choices = []
            for other, candidate_pool in enumerate(config.pools):
                left = candidate_pool.count - (trainer if other == index else 0)
                amounts = {left} if config.objective == "throughput" else {left * part // _PARTS for part in range(_PARTS + 1)}
                options = {(other, gpus // tp * tp, tp) for gpus in amounts for tp in parallel[other] if gpus >= tp}
                choices.append([*sorted(options), None] if config.objective == "cost" or not options else sorted(options))
            for chosen in itertools.product(*choices):
                rollouts = tuple(choice for choice in chosen if choice is not None)
                if rollouts:
                    yield Candidate(index, trainer, rollouts)


def layout_of(config: PlanConfig, candidate: Candidate, c: Constants = DEFAULT) -> Layout:
    """Raises LaminarError when the model cannot be trained on the candidate's GPUs."""
    gpu, gpus = config.pools[candidate.trainer_pool].gpu, candidate.trainer_gpus
    layout = trainer_layout(MODELS[config.model], GPUS[gpu], gpus, c)
    if layout is None:
        raise LaminarError(f"plan: {config.model} cannot be trained on {gpus} {gpu}")
    return layout


def bound(config: PlanConfig, candidate: Candidate, mean: float, context: float, c: Constants = DEFAULT) -> float:
    """Tokens/s (prompts included) that neither side can exceed: the trainer's FLOPs, and decoding with full batches all the time.

    `mean`: response tokens; `context`: mean tokens before a generated token.
    """
    model, w = MODELS[config.model], config.workload
    rollout_gpus = sum(gpus for _, gpus, _ in candidate.rollouts)
    gpu, layout = GPUS[config.pools[candidate.trainer_pool].gpu], layout_of(config, candidate, c)
    job = job_costs(model, gpu, candidate.trainer_gpus, layout, rollout_gpus, w.max_response_tokens, c)
    # Attention of the mean length: no more than that of the lengths (mean of squares), so the bound stays one.
    mean_tokens = mean + w.prompt_tokens
    train = 1.0 / (
        job.train_token + job.logprob_token + (job.train_attention + job.logprob_attention) * mean_tokens + job.handling / mean_tokens
    )
    generate = 0.0
    for pool, gpus, tp in candidate.rollouts:
        gpu = GPUS[config.pools[pool].gpu]
        costs = engine_costs(model, gpu, tp, c)
        batch = min(config.max_concurrent, kv_capacity(model, gpu, tp, c.kv_memory_share) / context)
        generate += gpus // tp * batch / costs.step(batch, batch * context)
    return _SLACK * min(train, generate * (mean + w.prompt_tokens) / mean)


def evaluate(config: PlanConfig, candidate: Candidate, c: Constants = DEFAULT) -> dict:
    """Figures of a simulated run of it."""
    mtbf = [pool.mtbf_hours and pool.mtbf_hours * 3600 for pool in config.pools]
    rollouts = [(GPUS[config.pools[pool].gpu], gpus, tp, mtbf[pool]) for pool, gpus, tp in candidate.rollouts]
    trainer_mtbf = mtbf[candidate.trainer_pool]
    trainer_mtbf = trainer_mtbf and trainer_mtbf / max(1, candidate.trainer_gpus // GPUS_PER_MACHINE)
    rules = dataclasses.replace(PIPELINES["laminar"], max_staleness=config.max_staleness)
    run = setup(
        rules, MODELS[config.model], GPUS[config.pools[candidate.trainer_pool].gpu], candidate.trainer_gpus, rollouts, config.workload, c,
        steps=config.steps, warmup_steps=config.warmup_steps, seed=config.seed, max_concurrent=config.max_concurrent,
        trainer_mtbf=trainer_mtbf,
    )  # fmt: skip
    return simulate(run).figures


def judge(config: PlanConfig, planned: Planned) -> None:
    """Score of a simulated candidate; -inf when it leaves the trainer idle beyond what `trainer_busy` allows (objective=cost only)."""
    assert planned.figures is not None
    rate = planned.figures["tokens_per_second"]
    planned.score = rate if config.objective == "throughput" else rate * 3600 / planned.price
    busy = 1.0 - planned.figures["trainer_wait_share"]
    if config.objective == "cost" and busy < config.trainer_busy:
        planned.why_not, planned.score = f"the trainer is busy for {busy:.0%} of the time only", -math.inf


def search(config: PlanConfig, say: Callable[[str], None] = lambda line: None, c: Constants = DEFAULT) -> Plan:
    """Raises LaminarError when nothing fits or nothing keeps the trainer busy."""
    work = Workload(config.workload, config.seed, 1)
    lengths = [n for index in range(256) for n in work.lengths(index)]
    mean = sum(lengths) / len(lengths)
    context = config.workload.prompt_tokens + sum(n * n for n in lengths) / (2 * sum(lengths))
    found = []
    for candidate in candidates(config, c):
        rate, cost = bound(config, candidate, mean, context, c), price(config, candidate)
        found.append(Planned(candidate, rate if config.objective == "throughput" else rate * 3600 / cost, price=cost))
    if not found:
        raise LaminarError(f"plan: {config.model} fits on no pool that is not preemptible; add GPUs or take a smaller model")
    found.sort(key=lambda planned: -planned.bound)
    best: Planned | None = None
    tried: list[Planned] = []
    for planned in found:
        if best is not None and planned.bound <= best.score:
            break
        planned.figures = evaluate(config, planned.candidate, c)
        judge(config, planned)
        tried.append(planned)
        say(f"{describe(config, planned.candidate)}: {planned.figures['tokens_per_second']:,.0f} tokens/s {planned.why_not}")
        if planned.score > (best.score if best else -math.inf):
            best = planned
    if best is None or best.score == -math.inf:
        raise LaminarError(
            f"plan: no part of the pools keeps the trainer busy for {config.trainer_busy:.0%}; lower trainer_busy or add rollout GPUs"
        )
    others = sorted((planned for planned in tried if planned is not best), key=lambda planned: -planned.score)
    return Plan(best, others[0] if others else None, len(tried), len(found))


def describe(config: PlanConfig, candidate: Candidate) -> str:
    rollouts = ", ".join(f"{gpus // tp} replicas of TP{tp} on {gpus} {config.pools[pool].gpu}" for pool, gpus, tp in candidate.rollouts)
    return f"train on {candidate.trainer_gpus} {config.pools[candidate.trainer_pool].gpu}; {rollouts}"


def explain(plan: Plan) -> str:
    """Why the runner-up is second."""
    best, second = plan.best, plan.runner_up
    if second is None or best.figures is None or second.figures is None:
        return "no other candidate could be better"
    if second.why_not:
        return second.why_not
    a, b = best.figures, second.figures
    side = "its trainer waits" if b["trainer_wait_share"] > a["trainer_wait_share"] + 0.01 else (
        "its trainer is the narrower side" if b["trainer_wait_share"] < 0.05 else "its rollouts fill less of their KV"
    )  # fmt: skip
    waits = f"trainer waits {b['trainer_wait_share']:.0%} against {a['trainer_wait_share']:.0%}"
    idle = f"rollouts idle {b['rollout_idle_share']:.0%} against {a['rollout_idle_share']:.0%}"
    return f"{1 - second.score / best.score:.1%} worse: {side} ({waits}, {idle})"
