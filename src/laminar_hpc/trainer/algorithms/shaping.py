"""Rewards before advantages are taken of them. Pure; called by trainer/step/learner.py on every rank with the
same batch."""

import random
from collections.abc import Sequence
from typing import TypeVar

import torch

from laminar_hpc.trainer.algorithms.groups import by_group

T = TypeVar("T")


def overlong_punishment(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, arXiv 2503.14476 equation 13: 0 up to longest - buffer
    response tokens, then linearly down to -1 at `longest`, and -1 beyond. It is added to the reward. `tokens`
    are those that `longest` bounds: over several turns what tools gave is among them. A buffer of 0 punishes
    nothing."""
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (tokens - (longest - buffer)) / buffer))


def length_rescaled(
    rewards: torch.Tensor, lengths: torch.Tensor, sizes: Sequence[int], penalty: float
) -> torch.Tensor:
    """GR3, Group Relative Reward Rescaling, arXiv 2603.10535: r / (1 + penalty * length / mean length of its
    group). A product, so that a wrong answer (0) gains nothing by being short. rewards float64, lengths int64
    [trajectories], group after group -> float64 [trajectories]."""

    def relative(group: torch.Tensor) -> torch.Tensor:
        return group / group.mean(dim=1, keepdim=True)

    return rewards / (1 + penalty * by_group(lengths.double(), sizes, relative))


def shuffled(values: list[T], seed: int, step: int) -> list[T]:
    """The same values on other trajectories, a permutation of the whole batch that depends on (seed, step)
    alone: the negative control."""
    permuted = list(values)
    random.Random(f"rewards {seed} {step}").shuffle(permuted)
    return permuted
