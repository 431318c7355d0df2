"""The whole batch of a step as advantages see it. Made by trainer/step/learner.py, the same on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class RewardPart(NamedTuple):
    """One of reward.functions: its weight in the sum, and what it gave, float64 [trajectories]; 0 where it
    failed."""

    weight: float
    rewards: torch.Tensor


@dataclass(frozen=True)
class ScoredBatch:
    """Trajectories, group after group.

    rewards: float64 [trajectories], after shaping and less the KL where that is in the reward; sizes:
    trajectories of each group; tokens, lengths: int64 [trajectories], trained tokens and all tokens of each
    response; parts: by name of reward.functions, before shaping.
    """

    rewards: torch.Tensor
    sizes: Sequence[int]
    tokens: torch.Tensor
    lengths: torch.Tensor
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
