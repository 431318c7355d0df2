"""Advantages of groups whose rewards are all equal, by AERO's estimate of the mean. Pure."""

import torch


def estimated_advantages(rewards: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """AERO, arXiv 2602.14338: (r - p) / sqrt(p (1 - p)) with p = (c + 1) / (n + 2), the mean of the posterior of a uniform prior after c
    right among n; without the division where normalize_std is off.

    rewards [n] float in [0, 1], where c is their sum -> advantages [n]. n right ones give less than +1, n wrong ones more than -1, and
    the more there are the closer to 0. Raises ValueError for rewards outside [0, 1], for which p is no probability.
    """
    if bool((rewards < 0).any()) or bool((rewards > 1).any()):
        raise ValueError("algorithm.zero_variance=estimate needs rewards from 0 to 1")
    p = (rewards.sum() + 1) / (len(rewards) + 2)
    centred = rewards - p
    return centred / (p * (1 - p)).sqrt() if normalize_std else centred
