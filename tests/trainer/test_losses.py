"""Advantages and losses against values worked out by hand."""

import math

import pytest
import torch

from laminar_hpc.trainer.algorithms.advantages import EPSILON, group_advantages, shuffled
from laminar_hpc.trainer.algorithms.losses import clip_higher


def test_advantages_are_the_groups_own_z_scores() -> None:
    """(r - mean) / (std + EPSILON), std with n - 1; a group of equal rewards gets exactly zero."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    std = math.sqrt(4 * 0.25 / 3)
    expected = [[0.5 / (std + EPSILON), -0.5 / (std + EPSILON), -0.5 / (std + EPSILON), 0.5 / (std + EPSILON)], [0.0] * 4]
    assert torch.allclose(group_advantages(rewards, True), torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_advantages_without_std_are_centred_rewards() -> None:
    """normalize_std=false leaves the rewards' scale."""
    assert group_advantages(torch.tensor([[3.0, 1.0, 2.0]]), False).tolist() == [[1.0, -1.0, 0.0]]


def test_advantages_refuse_a_reward_that_is_not_finite() -> None:
    """A NaN would spread to its whole group unseen."""
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(torch.tensor([[1.0, math.nan]]), True)


def test_shuffled_rewards_are_a_permutation_by_seed_and_step() -> None:
    """The negative control keeps the rewards' distribution, and every rank draws the same permutation."""
    rewards = [float(i) for i in range(32)]
    assert shuffled(rewards, 1, 5) == shuffled(rewards, 1, 5)
    assert sorted(shuffled(rewards, 1, 5)) == rewards
    assert len({tuple(shuffled(rewards, seed, step)) for seed in range(3) for step in range(3)}) == 9


# ratio, advantage -> loss, gradient of the loss by the log-prob, clipped; with clip_low 0.2 and clip_high 0.28
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.27, 1.0, -1.27, -1.27, 0),  # between 1 + clip_low and 1 + clip_high: clip-higher lets it through
        (1.5, 1.0, -1.28, 0.0, 1),
        (0.5, 1.0, -0.5, -0.5, 0),  # too unlikely a good token is always pulled up
        (0.5, -1.0, 0.8, 0.0, 1),
        (0.79, -2.0, 1.6, 0.0, 1),
        (1.5, -1.0, 1.5, 1.5, 0),  # too likely a bad token is always pushed down
        (3.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clip_higher_in_closed_form(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    """Each side of the clip, for good and bad tokens (arXiv 2503.14476, equation 8)."""
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    tokens = clip_higher(logprob, torch.tensor([-1.0]), torch.tensor([advantage]), 0.2, 0.28)
    tokens.loss.sum().backward()
    assert tokens.loss.item() == pytest.approx(loss, abs=1e-6)
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert tokens.clipped.item() == clipped
    assert tokens.ratio.item() == pytest.approx(ratio, rel=1e-6)


def test_a_behaviour_logprob_that_is_not_finite_shows_in_the_loss() -> None:
    """Nothing is clamped away: the learner must be able to see it and skip the update."""
    tokens = clip_higher(torch.tensor([-1.0]), torch.tensor([-math.inf]), torch.tensor([-1.0]), 0.2, 0.28)
    assert not torch.isfinite(tokens.loss).all()
