"""Rewards before advantages are taken of them. Pure; called by trainer/step/learner.py on every rank with the
same batch."""

import random
from typing import TypeVar

T = TypeVar("T")


def overlong_punishment(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, arXiv 2503.14476 equation 13: 0 up to longest - buffer
    response tokens, then linearly down to -1 at `longest`, and -1 beyond. It is added to the reward. `tokens`
    are those that `longest` bounds: over several turns what tools gave is among them. A buffer of 0 punishes
    nothing."""
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (tokens - (longest - buffer)) / buffer))


def shuffled(values: list[T], seed: int, step: int) -> list[T]:
    """The same values on other trajectories, a permutation of the whole batch that depends on (seed, step)
    alone: the negative control."""
    permuted = list(values)
    random.Random(f"rewards {seed} {step}").shuffle(permuted)
    return permuted
