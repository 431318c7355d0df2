"""Objectives written out from their papers, one number after the other in plain Python: what tests and
bench/objectives.py hold trainer/algorithms/ against where no other project's code can be run. No shared code.

A trajectory is a list of tokens; log-probs `new`, `old`, `behaviour` are lists of numbers, the advantage `A`
is one number per trajectory.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

EPSILON = 1e-4


class Bounds(NamedTuple):
    low: float
    high: float


# ---- losses: (losses, their derivatives by each token's log-prob), of one trajectory ----------------------


def dppo(new: Sequence[float], old: Sequence[float], A: float, clip: Bounds) -> list[tuple[float, float]]:
    found = []
    for x, y in zip(new, old, strict=True):
        moved = math.exp(x) - math.exp(y)
        outside = moved > clip.high if A > 0 else moved < -clip.low
        weight = 0.0 if outside else min(math.exp(x - y), 20.0)
        found.append((-weight * A * x, -weight * A))
    return found


def sapo(
    new: Sequence[float], old: Sequence[float], A: float, good: float, bad: float
) -> list[tuple[float, float]]:
    found = []
    for x, y in zip(new, old, strict=True):
        t, r = (good if A > 0 else bad), math.exp(x - y)
        gate = 1 / (1 + math.exp(-t * (r - 1)))
        found.append((-4 / t * gate * A, -4 * gate * (1 - gate) * r * A))
    return found


def gmpo(new: Sequence[float], old: Sequence[float], A: float, clip: Bounds) -> list[tuple[float, float]]:
    """The trajectory's loss at each token, and its derivative by that token's log-prob times |y|."""
    product, free = 1.0, []
    for x, y in zip(new, old, strict=True):
        r = math.exp(x - y)
        bounded = min(max(r, math.exp(-clip.low)), math.exp(clip.high))
        chosen = min(r, bounded) if A > 0 else max(r, bounded)
        free.append(chosen == r)
        product *= chosen
    mean = product ** (1 / len(new))
    return [(-mean * A, -mean * A * is_free) for is_free in free]


# ---- corrections: the factor of each token's loss, of one trajectory --------------------------------------


def token_ratios(proximal: Sequence[float], behaviour: Sequence[float]) -> list[float]:
    return [math.exp(q) / math.exp(m) for q, m in zip(proximal, behaviour, strict=True)]


def correction(
    name: str,
    new: Sequence[float],
    proximal: Sequence[float],
    behaviour: Sequence[float],
    A: float,
    truncated: bool,
    bounds: Bounds,
    divergence: float,
) -> list[float]:
    ratios = token_ratios(proximal, behaviour)
    whole = math.prod(ratios)
    if name == "overlong_filter":
        return [0.0 if truncated else 1.0] * len(new)
    if name == "opsm":
        moved = fmean(m - x for x, m in zip(new, behaviour, strict=True))
        return [0.0 if A < 0 and moved > divergence else 1.0] * len(new)
    of_each = [whole] * len(new) if name.startswith("sequence") else ratios
    if name.endswith("tis"):
        return [min(max(r, bounds.low), bounds.high) for r in of_each]
    return [r if bounds.low <= r <= bounds.high else 0.0 for r in of_each]


# ---- advantages: of groups of rewards ----------------------------------------------------------------------


def grpo_batch_std(groups: list[list[float]]) -> list[float]:
    spread = stdev([r for group in groups for r in group]) + EPSILON
    return [(r - fmean(group)) / spread for group in groups for r in group]


def opo(groups: list[list[float]], tokens: list[list[int]]) -> list[float]:
    found = []
    for group, lengths in zip(groups, tokens, strict=True):
        baseline = sum(n * r for n, r in zip(lengths, group, strict=True)) / sum(lengths)
        found += [r - baseline for r in group]
    return found


def max_rl(groups: list[list[float]]) -> list[float]:
    return [(r - fmean(group)) / fmean(group) if any(group) else 0.0 for group in groups for r in group]


def gdpo(parts: list[tuple[float, list[list[float]]]]) -> list[float]:
    """parts: weight and groups of rewards of each function."""
    columns = []
    for weight, groups in parts:
        columns.append(
            [weight * (r - fmean(group)) / (stdev(group) + EPSILON) for group in groups for r in group]
        )
    summed = [sum(row) for row in zip(*columns, strict=True)]
    return [(x - fmean(summed)) / (stdev(summed) + EPSILON) for x in summed]


def length_rescaled(groups: list[list[float]], lengths: list[list[int]], penalty: float) -> list[float]:
    found = []
    for group, of_group in zip(groups, lengths, strict=True):
        mean = fmean(of_group)
        found += [r / (1 + penalty * n / mean) for r, n in zip(group, of_group, strict=True)]
    return found


# ---- terms that are added ----------------------------------------------------------------------------------


def k3_weighted(new: float, old: float, reference: float) -> tuple[float, float]:
    """(pi / old) (ref / pi - log(ref / pi) - 1), and its derivative by log pi, which is pi / old log(pi /
    ref)."""
    ratio, x = math.exp(new - old), reference - new
    return ratio * (math.exp(x) - x - 1), ratio * -x


def likelihood(right: list[float], logprobs: list[list[float]]) -> float:
    """The mean negative log-likelihood of the tokens of right answers."""
    tokens = [x for is_right, own in zip(right, logprobs, strict=True) if is_right for x in own]
    return -fmean(tokens) if tokens else 0.0
