"""Advantages group by group, where groups may differ in size, and of groups whose rewards are all equal.
Pure."""

from collections.abc import Callable, Sequence

import torch

from laminar_hpc.config.errors import LaminarError


def by_group(
    rewards: torch.Tensor, sizes: Sequence[int], advantages: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """rewards [trajectories, ...], group after group; `sizes`: trajectories of each; advantages: [groups,
    samples, ...] -> [groups, samples], rows apart from each other. Gives [trajectories]. Groups of one size
    are computed together."""
    of_all = rewards.new_empty(len(rewards))
    # the size of each trajectory's group
    owner = torch.repeat_interleave(torch.tensor(sizes), torch.tensor(sizes))
    for size in sorted(set(sizes)):
        of_all[owner == size] = advantages(
            rewards[owner == size].view(-1, size, *rewards.shape[1:])
        ).flatten()
    return of_all


def estimated_advantages(rewards: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """AERO, arXiv 2602.14338: (r - p) / sqrt(p (1 - p)) with p = (c + 1) / (n + 2), the mean of the posterior
    of a uniform prior after c right among n; without the division where normalize_std is off.

    rewards [groups, n] float in [0, 1], where c is the sum of a row -> the same shape. n right ones get less
    than +1, n wrong ones more than -1, and the more there are the closer to 0. Raises LaminarError for
    rewards outside [0, 1], for which p is no probability.
    """
    if bool((rewards < 0).any()) or bool((rewards > 1).any()):
        raise LaminarError(
            "algorithm.zero_variance=estimate needs rewards from "
            "0 to 1; scale the rewards, or use keep or filter"
        )
    p = (rewards.sum(1, keepdim=True) + 1) / (rewards.shape[1] + 2)
    centred = rewards - p
    return centred / (p * (1 - p)).sqrt() if normalize_std else centred
