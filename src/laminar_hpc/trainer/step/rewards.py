"""A step's rewards as advantages take them: shaped, by group, and each reward function's by itself. The same
on every rank. Called by trainer/step/learner.py."""

from collections import Counter
from collections.abc import Sequence

import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.trainer.algorithms.scored import RewardPart, ScoredBatch
from laminar_hpc.trainer.algorithms.shaping import length_rescaled, overlong_punishment, shuffled


def scored_batch(config: RunConfig, trajectories: Sequence[Trajectory], step: int) -> ScoredBatch:
    """Trajectories in the order of their groups. The metrics report the rewards as they came. Raises
    LaminarError for an incomplete group."""
    a, longest = config.algorithm, config.sampling.max_response_tokens
    order = list(range(len(trajectories)))
    if a.shuffle_rewards:
        order = shuffled(order, config.seed, step)
    sizes = _group_sizes(a, trajectories, step)
    lengths = torch.tensor([t.length for t in trajectories])
    rewards = _doubles([t.reward for t in trajectories])
    if a.length_penalty > 0:
        rewards = length_rescaled(rewards, lengths, sizes, a.length_penalty)
    buffer = a.overlong_buffer_tokens
    rewards = rewards + _doubles([overlong_punishment(t.length, longest, buffer) for t in trajectories])
    parts = {
        name: RewardPart(each.weight, _doubles([t.reward_parts.get(name, 0.0) for t in trajectories])[order])
        for name, each in reward_functions(config.reward).items()
        if config.reward.functions
    }
    trained = torch.tensor([t.trained for t in trajectories])
    return ScoredBatch(rewards[order], sizes, trained, lengths, parts)


def _doubles(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _group_sizes(a: AlgorithmConfig, trajectories: Sequence[Trajectory], step: int) -> list[int]:
    """Trajectories per group, in order; groups may differ in size when sampling is adaptive."""
    sizes = Counter(t.group_id for t in trajectories)
    largest = a.samples_per_prompt
    smallest = a.first_samples or largest
    wrong = {group: size for group, size in sizes.items() if not smallest <= size <= largest}
    if wrong:
        wanted = f"{largest} each" if smallest == largest else f"{smallest} to {largest} each"
        raise LaminarError(
            f"the batch of step {step} has incomplete groups (group: "
            f"trajectories) {wrong}; {wanted} are needed"
        )
    return list(sizes.values())
