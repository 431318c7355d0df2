"""One trainer step is the algorithm of the papers, by an independent implementation in plain torch and
transformers."""

import copy
import math
from pathlib import Path

import pytest
import torch

from helpers.trainer import tiny
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.policies.metrics import batch_metrics, merged
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step import learner
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.step.microbatch import make_microbatch


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: t.cpu().clone() for name, t in policy.canonical_tensors()}


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer__weight_decay": 0.1, "sampling__temperature": 0.7},
        {
            "optimizer__weight_decay": 0.1,
            "optimizer__clip_grad": 1e9,
            "algorithm__normalize_std": False,
            "trainer__distributed_optimizer": True,
        },
    ],
    ids=["clipped", "distributed-optimizer"],
)
def test_one_update_equals_plain_torch(settings: dict, untied_model: Path, world: None) -> None:
    """Loss to 1e-5, gradient norm to 1e-4 of itself, weights after AdamW to 1e-6; norms and biases without
    weight decay. Several micro-batches, tokens of the environment masked out, ratios on both sides of the
    clip, logits divided by the temperature."""
    config = tiny.make_config(untied_model, optimizer__lr=1e-3, **settings)
    batch = tiny.make_batch(seed=3)
    model = tiny.transformers_model(untied_model)
    c = config.optimizer
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": c.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps)
    loss = tiny.reference_loss(model, batch, config)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_grad)
    adam.step()

    policy = MegatronPolicy(config)
    before = weights(policy)
    metrics = Learner(config, policy).train(tiny.step_batch(list(reversed(batch))), 0, lambda: None)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert (norm > c.clip_grad) == (settings.get("optimizer__clip_grad") is None), (
        "the case of clipping is the one meant"
    )
    after, expected = weights(policy), model.state_dict()
    assert max((after[n] - before[n]).abs().max() for n in after) > 5e-4
    assert max((after[n] - expected[n]).abs().max().item() for n in after) < 2e-6
    assert metrics["learning_rate"] == c.lr and metrics["skipped_updates"] == 0


def test_metrics_of_a_step_are_those_of_the_whole_batch(tied_model: Path, world: None) -> None:
    """Ratio, clip fraction and entropy over all trained tokens, against transformers; the rest against the
    trajectories."""
    config = tiny.make_config(
        tied_model, optimizer__lr=0.0, algorithm__minibatches_per_step=2
    )  # lr 0: both see the same weights
    batch = tiny.make_batch(seed=4, weight_step=3)
    for i, t in enumerate(batch):
        t.reward_parts = {"accuracy": 1.0} if i < 4 else {}
    batch[5].reward_error, batch[6].version_spans = (
        "TimeoutError",
        [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)],
    )
    model = tiny.transformers_model(tied_model)
    ratios, entropies = [], []
    with torch.no_grad():
        for t in batch:
            logprobs, entropy = tiny.token_logprobs(model, t)
            mask = torch.tensor(t.loss_mask, dtype=torch.bool)
            ratios.append((logprobs - torch.tensor(t.logprobs)).exp()[mask])
            entropies.append(entropy[mask])
    ratio, entropy = torch.cat(ratios), torch.cat(entropies)
    metrics = Learner(config, MegatronPolicy(config)).train(tiny.step_batch(batch), 5, lambda: None)
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean().item(), abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy.mean().item(), abs=1e-5)
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["reward_mean"] == sum(t.reward for t in batch) / 16
    assert metrics["accuracy_mean"] == (4 + sum(t.reward > 0 for t in batch[4:])) / 16
    assert metrics["reward_error_count"] == 1 and metrics["versions_per_trajectory_max"] == 2
    assert metrics["staleness_generation_mean"] == 1 and metrics["staleness_training_max"] == 2
    assert (
        metrics["response_tokens"] == sum(len(t.response_tokens) for t in batch)
        and metrics["trajectories"] == 16
    )
    assert metrics["truncated_fraction"] == sum(t.finish_reason == "length" for t in batch) / 16


def test_order_of_arrival_does_not_matter(tied_model: Path, world: None) -> None:
    """The same batch in another order gives the same weights, bit for bit."""
    config, found = tiny.make_config(tied_model, algorithm__minibatches_per_step=2), []
    for arrange in (list, lambda b: list(reversed(b))):
        policy = MegatronPolicy(config)
        Learner(config, policy).train(tiny.step_batch(arrange(tiny.make_batch(seed=5))), 0, lambda: None)
        found.append(weights(policy))
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_each_micro_batch_is_made_once(tied_model: Path, world: None, monkeypatch) -> None:
    """Making one is work of the step, as long as its packs are large."""
    made = []

    def counted(examples: list, *others: object) -> object:
        made.append([example.text.response.trajectory_id for example in examples])
        return make_microbatch(examples, *others)

    monkeypatch.setattr(learner, "make_microbatch", counted)
    config, batch = tiny.make_config(tied_model), tiny.make_batch(seed=5)
    Learner(config, MegatronPolicy(config)).train(tiny.step_batch(batch), 0, lambda: None)
    assert len(made) > 1
    assert sorted(i for one in made for i in one) == sorted(t.trajectory_id for t in batch)


def test_the_fence_is_passed_once_before_the_weights_change(tied_model: Path, world: None) -> None:
    """Publishing may read the live weights until then, also during the first forward and backward."""
    config = tiny.make_config(tied_model, algorithm__minibatches_per_step=2)
    policy, fences = MegatronPolicy(config), []
    before = weights(policy)
    Learner(config, policy).train(
        tiny.step_batch(tiny.make_batch(seed=5)), 0, lambda: fences.append(weights(policy))
    )
    assert len(fences) == 1
    assert all(torch.equal(fences[0][n], before[n]) for n in before)


def test_shuffled_rewards_change_the_update_but_not_the_rewards_mean(tied_model: Path, world: None) -> None:
    """The negative control trains on permuted rewards and reports the true ones."""
    batch, metrics = tiny.make_batch(seed=6), []
    for shuffle in (False, True):
        config = tiny.make_config(tied_model, algorithm__shuffle_rewards=shuffle)
        metrics.append(Learner(config, MegatronPolicy(config)).train(tiny.step_batch(batch), 0, lambda: None))
    assert metrics[0]["reward_mean"] == metrics[1]["reward_mean"]
    assert abs(metrics[0]["grad_norm"] - metrics[1]["grad_norm"]) > 1e-3


def test_a_gradient_that_is_not_finite_is_skipped_and_too_many_end_the_run(
    tied_model: Path, world: None
) -> None:
    """Weights and optimizer stay as they were, the update is counted; after optimizer.max_skipped_updates in
    a row the run ends."""
    config = tiny.make_config(tied_model, optimizer__max_skipped_updates=2)
    policy = MegatronPolicy(config)
    learner, before = Learner(config, policy), weights(policy)
    good, bad = tiny.make_batch(seed=7), tiny.make_batch(seed=7)
    bad[3] = copy.deepcopy(bad[3])
    bad[3].logprobs[0] = -math.inf
    metrics = learner.train(tiny.step_batch(bad), 0, lambda: None)
    assert metrics["skipped_updates"] == 1 and all(map(math.isfinite, metrics.values()))
    assert all(torch.equal(t, before[n]) for n, t in weights(policy).items())
    assert learner.train(tiny.step_batch(good), 1, lambda: None)["skipped_updates"] == 0
    assert all(torch.isfinite(t).all() for t in weights(policy).values())
    learner.train(tiny.step_batch(bad), 2, lambda: None)
    with pytest.raises(
        LaminarError,
        match="2 optimizer updates in a row had gradients that are not finite, the last at step 3",
    ):
        learner.train(tiny.step_batch(bad), 3, lambda: None)


def test_a_run_that_allows_no_skipped_update_ends_at_the_first(tied_model: Path, world: None) -> None:
    """With optimizer.max_skipped_updates=0, and not before."""
    config = tiny.make_config(tied_model, optimizer__max_skipped_updates=0)
    learner, batch = Learner(config, MegatronPolicy(config)), tiny.make_batch(seed=7)
    learner.train(tiny.step_batch(batch), 0, lambda: None)
    batch[3].logprobs[0] = -math.inf
    with pytest.raises(LaminarError, match="1 optimizer updates in a row had gradients"):
        learner.train(tiny.step_batch(batch), 1, lambda: None)


def test_empty_micro_batches_and_untrained_trajectories_add_nothing(tied_model: Path, world: None) -> None:
    """A rank with fewer micro-batches runs empty ones beside the others; a pack may hold only tokens that the
    environment gave."""
    policy = MegatronPolicy(tiny.make_config(tied_model))
    learner, batch = Learner(policy.config, policy), tiny.make_batch(seed=11)[:3]
    untrained = copy.deepcopy(batch[2])
    untrained.loss_mask = [0] * len(untrained.response_tokens)
    real = make_microbatch(tiny.examples(batch, [1.0, -1.0, 0.5]), policy.device)
    idle = [
        make_microbatch([], policy.device),
        make_microbatch(tiny.examples([untrained], [1.0]), policy.device),
    ]

    def gradient(micro_batches: list) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([each.sums for each in policy.accumulate(micro_batches, learner._loss)])
        return torch.cat([p.main_grad.flatten().cpu() for p in policy.gpt.parameters()]), rows.sum(0)

    alone, beside = gradient([real]), gradient([idle[0], real, *idle])
    assert torch.allclose(alone[0], beside[0], atol=1e-7) and alone[0].abs().max() > 0
    assert torch.equal(alone[1], beside[1])


def test_an_incomplete_group_is_refused(tied_model: Path, world: None) -> None:
    """A group's advantage needs all its samples."""
    config = tiny.make_config(tied_model)
    with pytest.raises(LaminarError, match=r"incomplete groups \(group: trajectories\) \{3: 3\}"):
        Learner(config, MegatronPolicy(config)).train(
            tiny.step_batch(tiny.make_batch(seed=8)[:-1]), 0, lambda: None
        )


def test_warm_up_is_linear_and_in_trainer_steps(tied_model: Path, world: None) -> None:
    """With 3 warm-up steps of 2 updates each, the k-th update has (k + 1) / 7 of the rate, from the seventh
    on all of it."""
    config = tiny.make_config(
        tied_model, optimizer__lr=7e-3, optimizer__warmup_steps=3, algorithm__minibatches_per_step=2
    )
    learner = Learner(config, MegatronPolicy(config))
    rates = [
        learner.train(tiny.step_batch(tiny.make_batch(seed=9)), step, lambda: None)["learning_rate"]
        for step in range(5)
    ]
    assert rates == pytest.approx([1e-3, 3e-3, 5e-3, 7e-3, 7e-3])


def test_staleness_by_hand() -> None:
    """Trained at step 7: weights of steps 4 and 6, finished at steps 5 and 7."""
    batch = tiny.make_batch(seed=10)[:2]
    (batch[0].weight_step, batch[0].step_finished), (batch[1].weight_step, batch[1].step_finished) = (
        (4, 5),
        (6, 7),
    )
    metrics = batch_metrics([made.record() for made in batch], 9, 7)
    assert (metrics["staleness_training_mean"], metrics["staleness_training_max"]) == (2.0, 3)
    assert (metrics["staleness_generation_mean"], metrics["staleness_generation_max"]) == (1.0, 1)


def test_metrics_of_minibatches_are_merged() -> None:
    """A mean of rewards is weighted by its trajectories; a reward function that gave none to a mini-batch is
    in the others'. Tokens whose KL estimate was bounded are added up."""
    parts = [
        {"trajectories": 2.0, "reward_mean/a": 1.0, "kl_bounded_tokens": 1.0},
        {"trajectories": 6.0, "reward_mean/a": 0.0, "reward_mean/b": 3.0, "kl_bounded_tokens": 4.0},
    ]
    expected = {"trajectories": 8.0, "reward_mean/a": 0.25, "reward_mean/b": 3.0, "kl_bounded_tokens": 5.0}
    assert merged(parts) == expected


def test_each_trajectorys_gap_is_that_of_the_moment_it_was_trained(untied_model: Path, world: None) -> None:
    """Those of the first mini-batch are scored by weights that no update of this step has touched:
    transformers' on the same weights. All say by how many mini-batches the trainer was ahead of the engine:
    two steps of two, and the first half of this step or not."""
    config = tiny.make_config(
        untied_model, algorithm__minibatches_per_step=2, optimizer__lr=5e-2, sampling__temperature=0.7
    )
    batch, model, policy = (
        tiny.make_batch(seed=3, weight_step=1),
        tiny.transformers_model(untied_model),
        MegatronPolicy(config),
    )
    learner = Learner(config, policy)
    learner.train(tiny.step_batch(batch), 3, lambda: None)
    differ = 0
    for t in batch:
        gap, ahead = learner.mismatches[t.trajectory_id]
        mask = torch.tensor(t.loss_mask, dtype=torch.bool)
        with torch.no_grad():
            expected = float(
                (tiny.token_logprobs(model, t, 0.7)[0] - torch.tensor(t.logprobs)).abs()[mask].mean()
            )
        assert ahead in (4, 5) and (ahead == 5 or gap == pytest.approx(expected, abs=1e-5))
        differ += abs(gap - expected) > 1e-3
    assert sorted(ahead for _, ahead in learner.mismatches.values()) == [4] * 8 + [5] * 8 and differ > 4
