"""Groups of unlike size, as adaptive sampling gives them, and groups whose rewards are all equal."""

import math
from pathlib import Path

import pytest
import torch

from helpers.trainer import tiny
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.algorithms.advantages import group_advantages
from laminar_hpc.trainer.algorithms.groups import by_group, estimated_advantages
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

SIZES = [4, 2, 3, 2]


def test_groups_of_unlike_size_are_each_their_own() -> None:
    """Advantages of several sizes are those of each group alone."""
    rewards = torch.arange(11, dtype=torch.float64) ** 2
    found = by_group(rewards, SIZES, lambda rows: group_advantages(rows, True))
    expected = torch.cat([group_advantages(part[None], True)[0] for part in rewards.split(SIZES)])
    assert torch.equal(found, expected)


def test_the_estimate_worked_out_by_hand() -> None:
    """8 right of 8: p = 0.9, (1 - 0.9) / 0.3; 16 wrong of 16: p = 1/18, -p / sqrt(p (1 - p)); without the
    division just r - p."""
    right = estimated_advantages(torch.ones(2, 8, dtype=torch.float64), True)
    assert torch.allclose(right, torch.full((2, 8), 1 / 3, dtype=torch.float64), atol=1e-12)
    p = 1 / 18
    wrong = estimated_advantages(torch.zeros(1, 16, dtype=torch.float64), True)
    assert wrong[0].tolist() == pytest.approx([-p / math.sqrt(p * (1 - p))] * 16)
    assert estimated_advantages(torch.zeros(1, 16, dtype=torch.float64), False)[0].tolist() == pytest.approx(
        [-p] * 16
    )
    with pytest.raises(LaminarError, match="needs rewards from 0 to 1"):
        estimated_advantages(torch.full((1, 2), -1.0), True)


def batch() -> list:
    """make_batch's groups of four cut to SIZES; in the second all are wrong, in the third all right."""
    found = [t for t in tiny.make_batch(seed=3) if t.trajectory_id % 4 < SIZES[t.group_id]]
    for t in found:
        t.reward = {1: 0.0, 2: 1.0}.get(t.group_id, float(t.trajectory_id % 2))
    return found


def test_an_update_on_groups_of_unlike_size_equals_plain_torch(untied_model: Path, world: None) -> None:
    """Adaptive sampling (2 to 4 samples): loss and gradient norm are those of an independent implementation;
    two mini-batches train too."""
    config = tiny.make_config(untied_model, algorithm__first_samples=2, optimizer__clip_grad=1e9)
    model = tiny.transformers_model(untied_model)
    loss = tiny.reference_loss(model, batch(), config)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    metrics = Learner(config, MegatronPolicy(config)).train(
        tiny.step_batch(list(reversed(batch()))), 0, lambda: None
    )
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5) and metrics["grad_norm"] == pytest.approx(
        norm.item(), rel=1e-4
    )
    assert metrics["trajectories"] == sum(SIZES)
    config.algorithm.minibatches_per_step = 2
    assert (
        Learner(config, MegatronPolicy(config)).train(tiny.step_batch(batch()), 0, lambda: None)[
            "skipped_updates"
        ]
        == 0
    )


def test_equal_rewards_train_only_with_the_estimate(untied_model: Path, world: None) -> None:
    """keep: no gradient at all; estimate: groups of equal rewards push, right ones up and wrong ones down."""
    equal = [t for t in batch() if t.group_id in (1, 2)]
    norms = {}
    for choice in ("keep", "estimate"):
        config = tiny.make_config(untied_model, algorithm__first_samples=2, algorithm__zero_variance=choice)
        learner = Learner(config, MegatronPolicy(config))
        norms[choice] = learner.train(tiny.step_batch(equal), 0, lambda: None)["grad_norm"]
        batch_of_both = tiny.step_batch(equal)
        members, shares = learner._plan(batch_of_both.planned, 1, 0)
        examples = learner._examples(batch_of_both, shares, members, 0)
        advantages = [float(example.advantages[0]) for example in examples.values()]
    assert norms["keep"] == 0.0 and norms["estimate"] > 0.01
    assert [a > 0 for a in advantages] == [t.group_id == 2 for t in equal]


def test_a_group_of_a_wrong_size_is_refused(untied_model: Path, world: None) -> None:
    """The error names the groups, their sizes and the sizes that are allowed."""
    config = tiny.make_config(untied_model, algorithm__first_samples=3)
    with pytest.raises(
        LaminarError, match=r"incomplete groups .group: trajectories. \{1: 2, 3: 2\}; 3 to 4 each are needed"
    ):
        Learner(config, MegatronPolicy(config)).train(tiny.step_batch(batch()), 0, lambda: None)
