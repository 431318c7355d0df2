"""Advantages of complete groups. Pure; called by trainer/learner.py on every rank with the same batch, so all ranks get the same
numbers."""

import random

import torch

EPSILON = 1e-4  # added to the standard deviation; rewards are of the order of 1, so it only tames groups that are almost equal


def group_advantages(rewards: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """GRPO, arXiv 2402.03300 section 4.1.2: A_i = (r_i - mean(r)) / (std(r) + EPSILON), std with n - 1; without the division as in arXiv
    2503.20783.

    rewards [groups, samples] float -> advantages of the same shape. A group of equal rewards gets zeros. Raises ValueError for a reward
    that is not finite: it would silently poison its whole group.
    """
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is not finite")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not normalize_std or rewards.shape[1] == 1:
        return centred
    return centred / (rewards.std(dim=1, keepdim=True) + EPSILON)


def shuffled(rewards: list[float], seed: int, step: int) -> list[float]:
    """The same rewards on other trajectories, a permutation of the whole batch that depends on (seed, step) alone: the negative control."""
    permuted = list(rewards)
    random.Random(f"rewards {seed} {step}").shuffle(permuted)
    return permuted
