"""Advantages of a step's batch. Pure, but for what sums over the ranks; called by trainer/step/learner.py on
every rank."""

from collections.abc import Callable, Sequence

import torch

from laminar_hpc.config.schema import AlgorithmConfig
from laminar_hpc.trainer.algorithms.groups import by_group, estimated_advantages

# added to a standard deviation; rewards are of the order of 1, so it only tames groups that are almost equal
EPSILON = 1e-4
Total = Callable[[torch.Tensor], torch.Tensor]


def token_advantages(
    a: AlgorithmConfig,
    rewards: torch.Tensor,
    sizes: Sequence[int],
    tokens: torch.Tensor,
    penalties: torch.Tensor | None = None,
    own: Sequence[int] | None = None,
    total: Total = lambda tensor: tensor,
) -> list[torch.Tensor]:
    """The advantage of every trained token, float64 [tokens] of each trajectory in `own`, which are this
    rank's (None: all). One number for a whole trajectory takes up the memory of one.

    rewards [trajectories] float64, ordered by group; sizes: trajectories of each group; tokens [trajectories]
    int64: trained tokens of each; penalties [tokens of `own`] float64: kl_coefficient times the KL estimate
    where it belongs into the reward. `total` sums a tensor over the ranks. Raises ValueError for a reward
    that is not finite: it would silently poison its whole group or batch.
    """
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is not finite")
    mine = torch.arange(len(tokens)) if own is None else torch.tensor(own, dtype=torch.long)
    counts, spent = tokens[mine], torch.zeros_like(rewards)
    if penalties is not None:
        owner = torch.repeat_interleave(mine, counts)
        spent = total(spent.index_add(0, owner, penalties))  # of whole trajectories
    if a.advantage in ("grpo", "rloo"):
        values = by_group(rewards - spent, sizes, lambda rows: _relative(a, rows))
        return _one_for_all(values[mine], counts)
    if a.advantage == "reinforce_pp_baseline":
        rewards = by_group(rewards, sizes, lambda rows: group_advantages(rows, normalize_std=False))
    if penalties is None:
        return _one_for_all(whitened(rewards, tokens.double())[mine], counts)
    places = torch.repeat_interleave(torch.arange(len(mine)), counts)
    returns = rewards[mine][places] - _still_to_come(penalties, spent[mine], places)
    return list(whitened(returns, torch.ones_like(returns), total).split(counts.tolist()))


def _one_for_all(values: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    return [value.expand(int(count)) for value, count in zip(values, counts, strict=True)]


def _relative(a: AlgorithmConfig, rewards: torch.Tensor) -> torch.Tensor:
    """Advantages within groups of one size, [groups, samples] -> the same shape."""
    relative = leave_one_out(rewards) if a.advantage == "rloo" else group_advantages(rewards, a.normalize_std)
    if a.zero_variance == "estimate":
        equal = (rewards == rewards[:, :1]).all(1)
        relative[equal] = estimated_advantages(rewards[equal], a.normalize_std)
    return relative


def group_advantages(rewards: torch.Tensor, normalize_std: bool) -> torch.Tensor:
    """GRPO, arXiv 2402.03300 section 4.1.2: A_i = (r_i - mean(r)) / (std(r) + EPSILON), std with n - 1;
    without the division Dr. GRPO's, arXiv 2503.20783 section 3.2. rewards [groups, samples] -> the same
    shape. A group of equal rewards gets zeros."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not normalize_std or rewards.shape[1] == 1:
        return centred
    return centred / (rewards.std(dim=1, keepdim=True) + EPSILON)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """RLOO, arXiv 2402.14740: A_i = r_i - the mean of the other k - 1 rewards of its group, which equals k /
    (k - 1) (r_i - mean(r)). rewards [groups, samples], at least 2 samples -> the same shape."""
    samples = rewards.shape[1]
    return (rewards - rewards.mean(dim=1, keepdim=True)) * (samples / (samples - 1))


def whitened(
    returns: torch.Tensor, tokens: torch.Tensor, total: Total = lambda tensor: tensor
) -> torch.Tensor:
    """REINFORCE++, arXiv 2501.03262: (A - mean) / (std + EPSILON) over all tokens of the global batch, std
    with n. Its variant with a baseline takes the group's mean reward off before. returns [n] stand for
    `tokens` [n] tokens each -> the same shape; equal returns get zeros. `total` sums over the ranks."""
    count, summed = total(torch.stack((tokens.sum(), (tokens * returns).sum())))
    mean = summed / count.clamp(min=1)
    variance = total((tokens * (returns - mean) ** 2).sum()) / count.clamp(min=1)
    return (returns - mean) / (variance.sqrt() + EPSILON)


def _still_to_come(penalties: torch.Tensor, spent: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """REINFORCE++'s undiscounted return has the penalties of a token and of those behind it: their sum to the
    trajectory's end, [tokens]."""
    before = torch.cumsum(penalties, 0) - penalties  # of all tokens before, also of other trajectories
    starts = torch.cumsum(spent, 0) - spent
    return spent[owner] - (before - starts[owner])
