"""Whether ranges mean what they say, for bench/simulator.py: how many further draws of the constants lie in a
range that is made of eight, and how many published step times in that of their recipe."""

import math
import random
import statistics

from simulator_papers import row
from simulator_recipes import NEMO, RACKS, Recipe
from simulator_runs import made

from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.sweep import point
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.uncertainty import draw, interval, spreads

DRAWS = 8  # of a range, as laminar sim has by default
POOL = 64  # draws that ranges and further draws are taken from
TRIALS = 4000
PIPELINES = ("sync", "one_step", "laminar")
STEPS = 4  # of a recipe's run


def coverage(rows: list[dict]) -> dict[str, float]:
    """Share of further draws in ranges, over three pipelines of a small cluster: ranges of eight of a pool of
    draws, and a ninth. Goal: 0.75 to 0.85."""
    config = load_simulation("small", ["steps=4", "warmup_steps=2", "gpus=[16]", "trainer_share=0.5"])
    spread = spreads(MODELS[config.model], [GPUS[config.trainer_gpu], GPUS[config.rollout_gpu]])
    chance, found = random.Random(0), []
    for name in PIPELINES:
        trainer = 16 if name == "sync" else 8
        rates = []
        for number in range(POOL):
            config.constants = draw(number, 1, spread)
            rates.append(point(config, name, 16, trainer, config.steps).figures["tokens_per_second"])
        middle = statistics.median(rates)
        inside = 0
        for _ in range(TRIALS):
            *values, further = chance.sample(rates, DRAWS + 1)
            low, high = interval(values, middle)
            inside += low <= further <= high
        found.append(inside / TRIALS)
        rows.append(row("coverage", f"{name}: share of further draws in the range", 0.8, found[-1]))
    return {"coverage": statistics.fmean(found)}


def kind(recipe: Recipe) -> str:
    """What the range of a row is taken for."""
    if recipe.gpu not in ("H100", "H800"):
        return recipe.gpu
    return "experts" if MODELS[recipe.model].experts else "dense"


def published_inside(rows: list[dict]) -> dict[str, float]:
    """Share of the published step times of NeMo RL in their recipes' ranges, and the root mean squares of the
    logs of what they are off, by kind."""
    inside: dict[str, list[bool]] = {}
    off: dict[str, list[float]] = {}
    for recipe in (*NEMO, *RACKS):
        spread = spreads(MODELS[recipe.model], [GPUS[recipe.gpu]])
        middle = simulate(made(recipe)).figures["step_seconds"]
        base = _short(recipe, {})
        drawn = [middle * _short(recipe, draw(n, 0, spread)) / base for n in range(DRAWS)]
        low, high = interval(drawn, middle)
        inside.setdefault(kind(recipe), []).append(low <= recipe.seconds <= high)
        off.setdefault(kind(recipe), []).append(math.log(middle / recipe.seconds))
        gpus = recipe.train if recipe.mode == "sync" else recipe.train + recipe.generate
        what = f"NeMo RL {recipe.version}, {recipe.model}, {recipe.mode} on {gpus} {recipe.gpu}: s per step"
        note = f"{low:.0f} to {high:.0f}{'' if inside[kind(recipe)][-1] else ', outside'}"
        rows.append(row("coverage rows", what, recipe.seconds, middle, note))
    for name, found in inside.items():
        error = math.sqrt(statistics.fmean(log * log for log in off[name]))
        note = f"{sum(found)} of {len(found)}; off by {error:.2f} (root mean square of logs)"
        rows.append(
            row("coverage rows", f"share of published rows in the range, {name}", 0.8, _share(found), note)
        )
    every = [one for found in inside.values() for one in found]
    return {"published_rows_inside": _share(every)}


def _share(found: list[bool]) -> float:
    return sum(found) / len(found)


def _short(recipe: Recipe, drawn: dict[str, float]) -> float:
    return simulate(made(recipe, drawn, STEPS)).figures["step_seconds"]
