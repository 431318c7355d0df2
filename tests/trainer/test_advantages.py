"""Advantages and reward shaping against values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.objectives import ADVANTAGES
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.trainer.algorithms.advantages import (
    EPSILON,
    group_advantages,
    leave_one_out,
    token_advantages,
    whitened,
)
from laminar_hpc.trainer.algorithms.scored import ScoredBatch
from laminar_hpc.trainer.algorithms.shaping import overlong_punishment, shuffled
from laminar_hpc.trainer.step.rewards import scored_batch


def double(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flat(
    a: AlgorithmConfig, rewards: torch.Tensor, sizes: list[int], tokens: torch.Tensor, *arguments: object
) -> torch.Tensor:
    """Trajectory after trajectory."""
    return torch.cat(token_advantages(a, ScoredBatch(rewards, sizes, tokens, tokens), *arguments))


def test_grpo_advantages_are_the_groups_own_z_scores() -> None:
    """(r - mean) / (std + EPSILON), std with n - 1; a group of equal rewards gets exactly zero."""
    std = math.sqrt(4 * 0.25 / 3)
    expected = [
        [0.5 / (std + EPSILON), -0.5 / (std + EPSILON), -0.5 / (std + EPSILON), 0.5 / (std + EPSILON)],
        [0.0] * 4,
    ]
    found = group_advantages(double([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]]), True)
    assert torch.allclose(found, double(expected), atol=1e-12)


def test_grpo_advantages_without_std_are_centred_rewards() -> None:
    """normalize_std=false leaves the rewards' scale (Dr. GRPO)."""
    assert group_advantages(double([[3.0, 1.0, 2.0]]), False).tolist() == [[1.0, -1.0, 0.0]]


def test_rloo_takes_off_the_mean_of_the_others() -> None:
    """(4, 1, 1): 4 - 1, 1 - 2.5, 1 - 2.5."""
    assert torch.allclose(leave_one_out(double([[4.0, 1.0, 1.0]])), double([[3.0, -1.5, -1.5]]), atol=1e-12)


def test_reinforce_pp_is_whitened_over_the_tokens_of_the_batch() -> None:
    """Trajectories of 1 and 3 tokens with rewards 4 and 0: mean 1 and variance 3 over tokens, not over
    trajectories."""
    a = AlgorithmConfig(advantage="reinforce_pp", samples_per_prompt=2)
    found = flat(a, double([4.0, 0.0]), [2], torch.tensor([1, 3]), torch.zeros(4, dtype=torch.float64))
    scale = math.sqrt(3) + EPSILON
    assert torch.allclose(found, double([3 / scale, -1 / scale, -1 / scale, -1 / scale]), atol=1e-12)


def test_reinforce_pp_charges_a_token_for_the_kl_from_itself_on() -> None:
    """Rewards 1 and 2; penalties (0.1, 0.2) and (0.3): returns 0.7, 0.8 and 1.7 before whitening."""
    a = AlgorithmConfig(advantage="reinforce_pp", samples_per_prompt=2)
    found = flat(a, double([1.0, 2.0]), [2], torch.tensor([2, 1]), double([0.1, 0.2, 0.3]))
    assert torch.allclose(found, whitened(double([0.7, 0.8, 1.7]), double([1, 1, 1])), atol=1e-12)


def test_reinforce_pp_baseline_centres_the_group_first() -> None:
    """Two groups whose rewards differ by a constant get the same advantages."""
    a = AlgorithmConfig(advantage="reinforce_pp_baseline", samples_per_prompt=2)
    found = flat(
        a,
        double([1.0, 0.0, 6.0, 5.0]),
        [2, 2],
        torch.ones(4, dtype=torch.long),
        torch.zeros(4, dtype=torch.float64),
    )
    assert torch.allclose(found, double([1, -1, 1, -1]) * 0.5 / (0.5 + EPSILON), atol=1e-12)


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_kl_in_the_reward_is_that_of_the_whole_trajectory(advantage: str) -> None:
    """Rewards (1, 1) with penalties of 0.5 in all and of 0: as rewards (0.5, 1)."""
    a = AlgorithmConfig(advantage=advantage, normalize_std=False, samples_per_prompt=2)
    found = flat(a, double([1.0, 1.0]), [2], torch.tensor([2, 1]), double([0.4, 0.1, 0.0]))
    size = 0.25 if advantage == "grpo" else 0.5
    assert torch.allclose(found, double([-size, -size, size]), atol=1e-12)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@given(reward=st.floats(-100, 100), lengths=st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_equal_rewards_teach_nothing(advantage: str, reward: float, lengths: list[int]) -> None:
    """Whatever the lengths of the trajectories, also with none trained."""
    a = AlgorithmConfig(advantage=advantage, samples_per_prompt=2)
    reward = abs(reward) if advantage == "max_rl" else reward  # which takes no other
    found = flat(
        a, double([reward] * 4), [4], torch.tensor(lengths), torch.zeros(sum(lengths), dtype=torch.float64)
    )
    assert len(found) == sum(lengths) and (found.abs() < 1e-8).all()


@given(st.lists(st.floats(-10, 10), min_size=6, max_size=6), st.floats(-5, 5))
def test_group_baselines_sum_to_zero_and_ignore_a_shift(rewards: list[float], shift: float) -> None:
    """Of GRPO and RLOO, per group."""
    grouped = double(rewards).view(2, 3)
    for found in (lambda r: group_advantages(r, False), leave_one_out):
        assert (found(grouped).sum(1).abs() < 1e-9).all()
        assert torch.allclose(found(grouped), found(grouped + shift), atol=1e-9)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_reward_that_is_not_finite_is_refused(advantage: str) -> None:
    """A NaN would spread to its whole group or batch unseen."""
    with pytest.raises(ValueError, match="not finite"):
        flat(
            AlgorithmConfig(advantage=advantage, samples_per_prompt=2),
            double([1.0, math.nan]),
            [2],
            torch.tensor([1, 1]),
            double([0.0, 0.0]),
        )


@pytest.mark.parametrize(
    ("tokens", "punishment"), [(0, 0.0), (80, 0.0), (85, -0.25), (99, -0.95), (100, -1.0), (130, -1.0)]
)
def test_overlong_punishment_by_hand(tokens: int, punishment: float) -> None:
    """At most 100 tokens, the last 20 punished linearly."""
    assert overlong_punishment(tokens, 100, 20) == pytest.approx(punishment, abs=1e-12)
    assert overlong_punishment(tokens, 100, 0) == 0.0


def test_shuffled_rewards_are_a_permutation_by_seed_and_step() -> None:
    """The negative control keeps the rewards' distribution, and every rank draws the same permutation."""
    rewards = [float(i) for i in range(32)]
    assert shuffled(rewards, 1, 5) == shuffled(rewards, 1, 5)
    assert sorted(shuffled(rewards, 1, 5)) == rewards
    assert len({tuple(shuffled(rewards, seed, step)) for seed in range(3) for step in range(3)}) == 9


def test_overlong_punishment_counts_what_is_bounded() -> None:
    """Of several turns sampling.max_response_tokens bounds all tokens, what tools gave included: a trajectory
    that was cut there is punished, however few of its tokens are its own."""
    config = RunConfig()
    config.sampling.max_response_tokens = 256
    config.algorithm.overlong_buffer_tokens = 64
    config.algorithm.samples_per_prompt = 4
    lengths = [(256, 150), (224, 10), (192, 192), (150, 150)]
    records = [
        Trajectory(i, 0, 0, 0, 0, 0, length, trained, 1, "length", 0.0, 1.0, reward=1.0)
        for i, (length, trained) in enumerate(lengths)
    ]
    assert scored_batch(config, records, 0).rewards.tolist() == [0.0, 0.5, 1.0, 1.0]
