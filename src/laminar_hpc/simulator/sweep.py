"""Each pipeline of an experiment at each number of GPUs, with the known split or the best of a few."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator.groups import exchange_seconds, simulate_groups
from laminar_hpc.simulator.published_layout import layouts
from laminar_hpc.simulator.rules import PIPELINES, Rules
from laminar_hpc.simulator.run import SimulationOutcome, simulate
from laminar_hpc.simulator.schema import SimulationConfig
from laminar_hpc.simulator.settings import constants_of
from laminar_hpc.simulator.setup import Rollout, SimulationSetup, rollout_of, setup
from laminar_hpc.simulator.tables import GPUS, MODELS, Gpu
from laminar_hpc.simulator.trainer_cost import peak_rate
from laminar_hpc.simulator.uncertainty import Rates, draw, interval, spreads

Told = Callable[[str], None]  # is told how far the work has come

_RANGE_STEPS = 2  # beyond the warm-up, while constants are drawn
_SEARCH_STEPS = 3  # beyond the warm-up, while splits are compared


def rules_of(config: SimulationConfig, pipeline: str) -> Rules:
    """The pipeline's rules, with the configuration's staleness bound; 0 if synchronous by name. A GPU of one
    type does not become one of the other, so where there are two none does both."""
    rules = PIPELINES[pipeline]
    if config.trainer_gpu != config.rollout_gpu:
        rules = dataclasses.replace(rules, placement="split")
    if config.max_staleness is not None and rules.max_staleness != 0:
        rules = dataclasses.replace(rules, max_staleness=config.max_staleness)
    return rules


def rollouts_of(config: SimulationConfig, gpus: int) -> list[Rollout]:
    """Of one trainer group: `gpus` beside the trainer, and its part of each site."""
    tensor_parallel = config.replica_gpus
    mtbf = config.rollout_mtbf_hours and config.rollout_mtbf_hours * 3600
    parts = [(site, site.count // config.trainer_groups) for site in config.sites]
    return [
        Rollout(GPUS[config.rollout_gpu], gpus, tensor_parallel, mtbf),
        *(rollout_of(site, count, tensor_parallel) for site, count in parts),
    ]


def setup_of(
    config: SimulationConfig, pipeline: str, gpus: int, trainer_gpus: int, steps: int, watch: bool = False
) -> SimulationSetup:
    """One run. `gpus`, `trainer_gpus`: of one trainer group."""
    rules = rules_of(config, pipeline)
    rollout_gpus = gpus if rules.placement == "colocated" else gpus - trainer_gpus
    return setup(
        rules,
        MODELS[config.model],
        GPUS[config.trainer_gpu],
        trainer_gpus,
        rollouts_of(config, rollout_gpus),
        config.workload,
        constants_of(config),
        engine=config.engine,
        cuda_graphs=config.cuda_graphs,
        speculation=config.speculation,
        lora=config.lora,
        steps=steps,
        warmup_steps=config.warmup_steps,
        seed=config.seed,
        max_concurrent=config.max_concurrent,
        checkpoint_every=config.checkpoint_every,
        watch=watch,
        trainer_mtbf=config.trainer_mtbf_hours and config.trainer_mtbf_hours * 3600,
    )


def point(
    config: SimulationConfig,
    pipeline: str,
    gpus: int,
    trainer_gpus: int,
    steps: int,
    watch: bool = False,
    groups: int = 1,
) -> SimulationOutcome:
    """One simulated run. `gpus`, `trainer_gpus`: of one of `groups` trainer groups."""
    return simulated(config, setup_of(config, pipeline, gpus, trainer_gpus, steps, watch), groups)


def simulated(config: SimulationConfig, made: SimulationSetup, groups: int) -> SimulationOutcome:
    """`made`, of one of `groups` trainer groups."""
    if groups == 1:
        return simulate(made)
    exchange = exchange_seconds(MODELS[config.model], groups, constants_of(config))
    return simulate_groups(made, groups, exchange)


def _silence(line: str) -> None:
    """Nobody is told."""


def split(config: SimulationConfig, pipeline: str, gpus: int, tried: Told = _silence) -> int:
    """The GPUs of a group's trainer: known, or the best of a few shares by a short run each."""
    if rules_of(config, pipeline).placement == "colocated":
        return gpus
    tensor_parallel = config.replica_gpus
    share = config.splits.get(f"{pipeline}@{gpus}", config.splits.get(pipeline, config.trainer_share))
    if share is not None:
        trainer = round(gpus * share / tensor_parallel) * tensor_parallel
        least = 0 if config.sites else tensor_parallel  # rollouts beside the trainer
        if not 0 < trainer <= gpus - least:
            raise LaminarError(
                f"{pipeline} at {gpus} GPUs: a trainer share of "
                f"{share:g} leaves no GPUs to train or to generate"
            )
        return trainer
    return best_split(config, pipeline, gpus, tried)


def holds(config: SimulationConfig, trainer_gpus: int) -> bool:
    """Whether a group's trainer on so many GPUs has memory for weights, gradients and optimizer."""
    model, gpu = MODELS[config.model], GPUS[config.trainer_gpu]
    return bool(layouts(model, gpu, trainer_gpus, constants_of(config), config.lora))


def best_split(config: SimulationConfig, pipeline: str, gpus: int, tried: Told) -> int:
    """By short runs: every eighth of the GPUs first, then ever closer to the best, down to single replicas.
    Of the numbers at which the trainer's memory suffices, where there are any."""
    steps = min(config.steps, config.warmup_steps + _SEARCH_STEPS)
    tensor_parallel = config.replica_gpus
    every = range(tensor_parallel, gpus - tensor_parallel + 1, tensor_parallel)
    possible = [n for n in every if holds(config, n)] or list(every)
    rates: dict[int, float] = {}

    def rate(place: int) -> float:
        n = possible[place]
        if n not in rates:
            try:
                rates[n] = point(config, pipeline, gpus, n, steps).figures["tokens_per_second"]
                tried(f"{n} of {gpus} GPUs train: {rates[n]:,.0f} tokens/s")
            except LaminarError as error:  # a division that ends in nothing is none to choose
                rates[n] = 0.0
                tried(f"{n} of {gpus} GPUs train: {error}")
        return rates[n]

    last, width = len(possible) - 1, max(1, len(possible) // 8)
    best = max(range(0, len(possible), width), key=rate)
    while width > 1:
        width = -(-width // 2)
        best = max({max(0, best - width), best, min(last, best + width)}, key=rate)
    return possible[best]


def rate_range(
    config: SimulationConfig,
    pipeline: str,
    gpus: int,
    trainer_gpus: int,
    middle: float,
    rates: Rates,
    tried: Told,
) -> tuple[float, float]:
    """Tokens/s that the constants allow, around the prediction `middle`: how a short run changes from draw to
    draw. What the configuration says of a constant is certain."""
    steps = min(config.steps, config.warmup_steps + _RANGE_STEPS)
    model = MODELS[config.model]
    gpus_of: tuple[Gpu, ...] = (GPUS[config.trainer_gpu], GPUS[config.rollout_gpu])
    gpus_of += tuple(GPUS[site.gpu] for site in config.sites)
    spread = spreads(model, gpus_of)
    of_tables = [dataclasses.asdict(model), *(dataclasses.asdict(gpu) for gpu in gpus_of)]

    def short(constants: dict[str, float]) -> float:
        other = dataclasses.replace(config, constants={**constants, **config.constants})
        key = [dataclasses.asdict(other), of_tables, pipeline, gpus, trainer_gpus, steps]
        return rates.of(
            key, lambda: point(other, pipeline, gpus, trainer_gpus, steps).figures["tokens_per_second"]
        )

    base, drawn = short({}), list[float]()
    for number in range(config.draws):
        drawn.append(middle * short(draw(number, config.seed, spread)) / base)
        tried(f"{middle:,.0f} tokens/s; {number + 1} of {config.draws} draws for the range")
    low, high = interval(drawn, middle) if drawn else (middle, middle)
    each = peak_rate(model, GPUS[config.trainer_gpu], trainer_gpus, config.lora, constants_of(config))
    return low, max(middle, min(high, config.trainer_groups * each))


def sweep(
    config: SimulationConfig, say: Told = _silence, cache: Path | None = None, progress: Told = _silence
) -> list[dict]:
    """Rows of pipeline, gpus, the outcome and the range of its rate; `say` is told of each, `progress` of all
    short runs on the way to it. `cache`: a file for the rates that ranges are made of."""
    rows, rates = [], Rates(cache)
    points = [(gpus, pipeline) for gpus in config.gpus for pipeline in config.pipelines]
    names, scales = ", ".join(config.pipelines), ", ".join(map(str, config.gpus))
    say(f"{names} on {scales} GPUs, each with draws={config.draws} short runs for its range")
    for number, (gpus, pipeline) in enumerate(points, 1):
        name = f"{number}/{len(points)} {pipeline} on {gpus} GPUs"

        def tried(line: str, name: str = name) -> None:
            progress(f"{name}: {line}")

        each, groups = gpus // config.trainer_groups, config.trainer_groups
        trainer_gpus = split(config, pipeline, each, tried)
        if not holds(config, trainer_gpus):
            say(
                f"{name}: no layout of a trainer on {trainer_gpus} {config.trainer_gpu} holds weights, "
                f"gradients and optimizer of {config.model}; what offloading them costs is not simulated"
            )
        outcome = point(config, pipeline, each, trainer_gpus, config.steps, watch=True, groups=groups)
        rate = outcome.figures["tokens_per_second"]
        low, high = rate_range(config, pipeline, each, trainer_gpus, rate, rates, tried)
        outcome.figures |= {"tokens_per_second_low": low, "tokens_per_second_high": high}
        say(f"{name}: {rate:,.0f} tokens/s, {low:,.0f} to {high:,.0f}")
        rows.append({"pipeline": pipeline, "gpus": gpus, "outcome": outcome})
    rates.save()
    return rows
