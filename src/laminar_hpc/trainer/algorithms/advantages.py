"""Advantages of a step's batch. Pure, but for what sums over the ranks; called by trainer/step/learner.py on
every rank.

Every advantage has one signature, which a function of the user's own (`algorithm.advantage=MODULE.FUNCTION`)
has too:

    advantage(a, batch) -> float64 [trajectories]

a: the settings of `algorithm`, its own under a.options; batch: the whole batch, see scored.py. It is called
on every rank with the same batch and must give the same numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.trainer.algorithms.groups import by_group, estimated_advantages
from laminar_hpc.trainer.algorithms.named import found_in
from laminar_hpc.trainer.algorithms.scored import ScoredBatch

# added to a standard deviation; rewards are of the order of 1, so it only tames groups that are almost equal
EPSILON = 1e-4
Total = Callable[[torch.Tensor], torch.Tensor]
Advantage = Callable[[AlgorithmConfig, ScoredBatch], torch.Tensor]


def token_advantages(
    a: AlgorithmConfig,
    batch: ScoredBatch,
    penalties: torch.Tensor | None = None,
    own: Sequence[int] | None = None,
    total: Total = lambda tensor: tensor,
) -> list[torch.Tensor]:
    """The advantage of every trained token, float64 [tokens] of each trajectory in `own`, which are this
    rank's (None: all). One number for a whole trajectory takes up the memory of one.

    penalties [tokens of `own`] float64: kl_coefficient times the KL estimate where it belongs into the
    reward: off a whole trajectory's, but in REINFORCE++ token by token. `total` sums a tensor over the ranks.
    Raises ValueError for a reward that is not finite: it would silently poison its whole group or batch.
    """
    if not torch.isfinite(batch.rewards).all():
        raise ValueError("a reward is not finite")
    mine = torch.arange(len(batch.tokens)) if own is None else torch.tensor(own, dtype=torch.long)
    counts, spent = batch.tokens[mine], torch.zeros_like(batch.rewards)
    if penalties is not None:
        owner = torch.repeat_interleave(mine, counts)
        spent = total(spent.index_add(0, owner, penalties))  # of whole trajectories
        if a.advantage in _RETURNS:
            places = torch.repeat_interleave(torch.arange(len(mine)), counts)
            to_come = _still_to_come(penalties, spent[mine], places)
            returns = _RETURNS[a.advantage](batch)[mine][places] - to_come
            return list(whitened(returns, torch.ones_like(returns), total).split(counts.tolist()))
    advantage: Advantage = found_in(ADVANTAGES, "advantage", a.advantage)
    values = advantage(a, replace(batch, rewards=batch.rewards - spent))[mine]
    return [value.expand(int(count)) for value, count in zip(values, counts, strict=True)]


def grpo(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """`group_advantages` group by group; of groups whose rewards are all equal AERO's, if asked for."""

    def relative(rewards: torch.Tensor) -> torch.Tensor:
        values = group_advantages(rewards, a.normalize_std)
        if a.zero_variance == "estimate":
            equal = (rewards == rewards[:, :1]).all(1)
            values[equal] = estimated_advantages(rewards[equal], a.normalize_std)
        return values

    return by_group(batch.rewards, batch.sizes, relative)


def rloo(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """`leave_one_out` group by group."""
    return by_group(batch.rewards, batch.sizes, leave_one_out)


def reinforce_pp(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """REINFORCE++: `whitened` rewards, over all tokens of the batch."""
    return whitened(batch.rewards, batch.tokens.double())


def reinforce_pp_baseline(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """REINFORCE++ of rewards less their group's mean."""
    return whitened(_centred(batch), batch.tokens.double())


def grpo_batch_std(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """(r - mean of its group) / (std over all trajectories of the batch + EPSILON), std with n - 1: Z. Liu et
    al., "Part I: Tricks or Traps?", arXiv 2508.08221 section 4.1."""
    return _centred(batch) / (batch.rewards.std() + EPSILON)


def opo(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """OPO, arXiv 2505.23585 equation 6: r less the mean of its group weighted by trained tokens, the baseline
    of least variance where all tokens' gradients are alike."""

    def relative(group: torch.Tensor) -> torch.Tensor:
        rewards, tokens = group.unbind(2)
        weights = tokens / tokens.sum(1, keepdim=True).clamp(min=1)
        return rewards - (weights * rewards).sum(1, keepdim=True)

    return by_group(torch.stack((batch.rewards, batch.tokens.double()), 1), batch.sizes, relative)


def max_rl(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """MaxRL, arXiv 2602.02710: (r - mean) / mean in the group, zeros where all are 0: the gradient of the
    likelihood of a right answer, to the order of the group's size. Raises LaminarError for a reward below
    0."""
    if bool((batch.rewards < 0).any()):
        raise LaminarError(
            "algorithm.advantage=max_rl divides by the mean reward, and a reward is below 0; let wrong "
            "answers have 0, or use another advantage"
        )

    def relative(rewards: torch.Tensor) -> torch.Tensor:
        mean = rewards.mean(dim=1, keepdim=True)
        return torch.where(mean > 0, (rewards - mean) / mean.where(mean > 0, 1.0), 0.0)

    return by_group(batch.rewards, batch.sizes, relative)


def gdpo(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """GDPO, arXiv 2601.05242 equations 4 to 6: the GRPO advantage of each reward function by itself, their
    sum by the functions' weights, less its mean over the batch's trajectories, over its std (n - 1) +
    EPSILON. A reward of little variance counts as much as one of large."""
    summed = torch.zeros_like(batch.rewards)
    for part in batch.parts.values():
        relative = by_group(part.rewards, batch.sizes, lambda rows: group_advantages(rows, True))
        summed = summed + part.weight * relative
    return (summed - summed.mean()) / (summed.std() + EPSILON)


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
    (k - 1) (r_i - mean(r)). rewards [groups, samples] -> the same shape; of one sample the reward itself, as
    nothing is there to compare it with."""
    samples = rewards.shape[1]
    if samples == 1:
        return rewards.clone()
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


def _centred(batch: ScoredBatch) -> torch.Tensor:
    return by_group(batch.rewards, batch.sizes, lambda rows: group_advantages(rows, normalize_std=False))


def _still_to_come(penalties: torch.Tensor, spent: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """REINFORCE++'s undiscounted return has the penalties of a token and of those behind it: their sum to the
    trajectory's end, [tokens]."""
    before = torch.cumsum(penalties, 0) - penalties  # of all tokens before, also of other trajectories
    starts = torch.cumsum(spent, 0) - spent
    return spent[owner] - (before - starts[owner])


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "grpo_batch_std": grpo_batch_std,
    "opo": opo,
    "max_rl": max_rl,
    "gdpo": gdpo,
}
# What is whitened, of the advantages that take the KL in the reward token by token.
_RETURNS: dict[str, Callable[[ScoredBatch], torch.Tensor]] = {
    "reinforce_pp": lambda batch: batch.rewards,
    "reinforce_pp_baseline": _centred,
}
