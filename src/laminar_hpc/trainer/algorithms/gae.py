"""Generalized advantage estimation over the trained tokens of trajectories, and the critic's loss. Pure;
called by trainer/step/critic.py.

J. Schulman et al., arXiv 1506.02438 equations 11 to 16, with a state before each trained token:

    delta_t = r_t + gamma V_{t+1} - V_t            V behind the last token is 0
    A_t     = delta_t + gamma lambda A_{t+1}

Tokens that the environment gave are no actions: they lie between two trained ones, and count neither as steps
nor in a discount. The policy and the critic have a lambda each: VAPO, arXiv 2504.05118 section 4.1, with the
critic's 1 by default, and the policy's, if it adapts to a length l, 1 - 1 / (alpha l) of its equation 6.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence


class Discounts(NamedTuple):
    """`alpha` above 0: the policy's lambda follows the length, in place of `policy`."""

    gamma: float = 1.0
    policy: float = 1.0
    critic: float = 1.0
    alpha: float = 0.0

    def policy_lambda(self, lengths: torch.Tensor) -> torch.Tensor:
        """float64 [trajectories], of these numbers of trained tokens."""
        if self.alpha <= 0:
            return torch.full((len(lengths),), self.policy, dtype=torch.float64)
        return (1 - 1 / (self.alpha * lengths.double().clamp(min=1))).clamp(min=0)


def estimates(
    rewards: Sequence[torch.Tensor], values: Sequence[torch.Tensor], discounts: Discounts
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Advantages by the policy's lambda, and the returns that the critic learns, A + V by the critic's.
    rewards, values: [trained tokens] of each trajectory; all float64."""
    if not rewards:
        return [], []
    lengths = torch.tensor([len(each) for each in rewards])
    r, v = (pad_sequence([x.double() for x in of], batch_first=True) for of in (rewards, values))
    following = torch.cat((v[:, 1:], v.new_zeros(len(v), 1)), 1)  # padding is 0, as what is behind the end
    delta = r + discounts.gamma * following - v
    of_policy = _summed(delta, discounts.gamma * discounts.policy_lambda(lengths))
    of_critic = _summed(delta, torch.full((len(v),), discounts.gamma * discounts.critic, dtype=v.dtype))
    parts = [(a[:n], b[:n]) for a, b, n in zip(of_policy, of_critic + v, lengths.tolist(), strict=True)]
    return [a for a, _ in parts], [b for _, b in parts]


def _summed(delta: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """delta [trajectories, tokens], factor [trajectories] -> x_t = delta_t + factor x_{t+1}."""
    if bool((factor == 1).all()):
        return delta.flip(1).cumsum(1).flip(1)
    found, later = torch.empty_like(delta), torch.zeros(len(delta), dtype=delta.dtype)
    for t in reversed(range(delta.shape[1])):
        later = delta[:, t] + factor * later
        found[:, t] = later
    return found


def value_losses(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token [tokens]: half the larger of the squared errors of V and of V held to within `clip` of what
    it was before the step's first update (PPO's implementation, arXiv 2005.12729 section 3); and whether the
    second one counted. 0 = no bound."""
    plain = (values - returns).square()
    if clip <= 0:
        return plain / 2, torch.zeros_like(plain)
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, (bounded > plain).float()
