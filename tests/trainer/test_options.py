"""Every option of config.algorithm trains what its paper says: two steps of two mini-batches against an
independent trainer."""

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.trainer import plain, tiny
from laminar_hpc.config.bounds import Choices, allowed
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

NARROW = {"clip_low": 0.02, "clip_high": 0.03}  # two mini-batches do not lead far from the proximal policy
OPTIONS = {
    "clip": {},
    "dual-clip": {"clip_dual": 1.5},
    "dr-grpo": {"normalize_std": False, "loss_aggregation": "constant"},
    "rloo": {"advantage": "rloo", "loss_aggregation": "sequences"},
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "kl_coefficient": 0.05,
        "kl_estimator": "k1",
        "kl_in_reward": True,
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "kl_coefficient": 0.05,
        "kl_estimator": "k2",
    },
    "grpo-kl-in-reward": {
        "kl_coefficient": 0.05,
        "kl_estimator": "k2",
        "kl_in_reward": True,
        "proximal": "recomputed",
        **NARROW,
    },
    "gspo": {"loss": "gspo", "loss_aggregation": "sequences", "clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"loss": "cispo", "clip_low": 0.5, "clip_high": 0.5},
    "aipo": {"loss": "aipo", "importance_weight_cap": 1.2, "advantage": "rloo"},
    "decoupled": {"proximal": "recomputed", **NARROW},
    "tis": {"proximal": "recomputed", "importance_weight_cap": 1.3, "kl_coefficient": 0.1, **NARROW},
    "decoupled-gspo": {
        "loss": "gspo",
        "loss_aggregation": "sequences",
        "proximal": "recomputed",
        "clip_low": 3e-3,
        "clip_high": 4e-3,
    },
    "sequence-mask": {"sequence_ratio_min": 0.9, "sequence_ratio_max": 1.1},
    "tis-sequence-mask": {
        "proximal": "recomputed",
        "importance_weight_cap": 2.0,
        "sequence_ratio_max": 1.0,
        "loss_aggregation": "sequences",
        **NARROW,
    },
    "overlong": {"overlong_buffer_tokens": 16},
    "dppo-opo-tis": {
        "loss": "dppo",
        "advantage": "opo",
        "proximal": "recomputed",
        "corrections": ["tis", "overlong_filter"],
        "importance_weight_cap": 1.3,
        "options": {"importance_weight_floor": 0.8},
        "clip_low": 1e-4,
        "clip_high": 1e-4,
    },
    "sapo-max_rl-icepop": {
        "loss": "sapo",
        "advantage": "max_rl",
        "proximal": "recomputed",
        "corrections": ["icepop"],
        "importance_weight_cap": 1.3,
        "length_penalty": 0.33,
    },
    "gmpo-batch_std-opsm": {
        "loss": "gmpo",
        "advantage": "grpo_batch_std",
        "loss_aggregation": "sequences",
        "corrections": ["opsm"],
        "options": {"opsm_divergence": 0.02},
    },
    "gdpo-sequence_tis-likelihood": {
        "advantage": "gdpo",
        "proximal": "recomputed",
        "corrections": ["sequence_tis"],
        "importance_weight_cap": 2.0,
        "likelihood_coefficient": 0.1,
        "kl_coefficient": 0.1,
        "kl_estimator": "k3_weighted",
        **NARROW,
    },
    "sequence_icepop-entropy": {
        "entropy_coefficient": 0.05,
        "proximal": "recomputed",
        "corrections": ["sequence_icepop"],
        "importance_weight_cap": 3.0,
        **NARROW,
    },
}
PARTS = {"right": {"function": "a.b"}, "short": {"function": "a.c", "weight": 0.3}}  # of gdpo


def settings(name: str) -> dict:
    return {f"algorithm__{key}": value for key, value in OPTIONS[name].items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_two_steps_equal_plain_torch(name: str, untied_model: Path, world: None) -> None:
    """Losses to 1e-5, gradient norms to 1e-4 of themselves, weights to 5e-6; several micro-batches, tokens of
    the environment masked out, logits divided by the temperature, a reference model that is not the trained
    one any more."""
    config = tiny.make_config(
        untied_model,
        optimizer__lr=2e-3,
        algorithm__minibatches_per_step=2,
        sampling__temperature=0.8,
        sampling__max_response_tokens=32,
        **settings(name),
        **({"reward__functions": PARTS} if "gdpo" in name else {}),
    )
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    trainer = plain.PlainTrainer(
        config, tiny.transformers_model(untied_model), tiny.transformers_model(untied_model)
    )
    for step in range(2):
        batch = tiny.make_batch(seed=20 + step)
        for t in batch:
            t.reward_parts = {"right": t.reward, "short": 1 / len(t.response_tokens)}
        losses, norms = trainer.train(batch, step)
        metrics = learner.train(tiny.step_batch(batch), step, lambda: None)
        if (
            config.algorithm.loss_aggregation != "tokens"
        ):  # else the mini-batches' shares in the mean are uneven
            assert metrics["loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
    after, expected = {n: t.clone() for n, t in policy.canonical_tensors()}, trainer.model.state_dict()
    started = tiny.transformers_model(untied_model).state_dict()
    assert max((after[n] - started[n]).abs().max() for n in after) > 1e-3
    assert max((after[n] - expected[n]).abs().max().item() for n in after) < 5e-6
    if config.algorithm.loss in ("clip", "gspo"):
        assert 0 < metrics["clip_fraction"] < 1
    if "sequence_ratio_max" in OPTIONS[name]:
        assert 0 < metrics["left_out_fraction"] < 1
    if config.algorithm.kl_coefficient:
        assert metrics["kl"] > 0


def test_every_choice_is_trained_by_one_of_the_options() -> None:
    """A choice that is added must be added here."""
    limits = {field.name: allowed(field) for field in dataclasses.fields(AlgorithmConfig)}
    trained = ("advantage", "loss", "loss_aggregation", "proximal", "kl_estimator")
    corrections = {name for option in OPTIONS.values() for name in option.get("corrections", ())}
    assert set(limits["corrections"].names) <= corrections
    choices = {
        key: limit.names for key, limit in limits.items() if isinstance(limit, Choices) and key in trained
    }
    assert len(choices) == len(trained)
    seen = {key: {option.get(key) for option in OPTIONS.values()} for key in choices}
    defaults = {
        "advantage": "grpo",
        "loss": "clip",
        "loss_aggregation": "tokens",
        "proximal": "behaviour",
        "kl_estimator": "k3",
    }
    elsewhere = {"gae"}  # test_critic.py
    assert all(set(names) - elsewhere <= seen[key] | {defaults[key]} for key, names in choices.items())


@pytest.mark.parametrize("name", ["clip", "dr-grpo", "reinforce_pp", "gspo", "tis-sequence-mask"])
def test_micro_batches_do_not_matter(name: str, tied_model: Path, world: None) -> None:
    """The same update from many small micro-batches as from one: denominators and recomputed log-probs are of
    the whole mini-batch."""
    found = []
    for budget in (40, 2000):
        config = tiny.make_config(
            tied_model,
            trainer__tokens_per_microbatch=budget,
            sampling__max_response_tokens=32,
            optimizer__lr=1e-3,
            **settings(name),
        )
        policy = MegatronPolicy(config)
        metrics = Learner(config, policy).train(tiny.step_batch(tiny.make_batch(seed=30)), 0, lambda: None)
        found.append((metrics, torch.cat([t.flatten() for _, t in policy.canonical_tensors()])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-5)
    assert (found[0][1] - found[1][1]).abs().max() < 1e-5


def test_the_reference_is_held_only_if_asked_for_and_never_moves(tied_model: Path, world: None) -> None:
    """Without a coefficient there is no copy. With one, the KL at the first update is 0, it grows, and
    swapping leaves the live weights where they were in memory."""
    config = tiny.make_config(tied_model)
    assert Learner(config, MegatronPolicy(config))._reference is None
    config = tiny.make_config(tied_model, algorithm__kl_coefficient=0.1, optimizer__lr=1e-2)
    policy = MegatronPolicy(config)
    learner, places = Learner(config, policy), [p.data_ptr() for p in policy.gpt.parameters()]
    kl = [learner.train(tiny.step_batch(tiny.make_batch(seed=s)), s, lambda: None)["kl"] for s in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-3
    assert places == [p.data_ptr() for p in policy.gpt.parameters()]
    initial = torch.cat([t.flatten() for _, t in MegatronPolicy(config).canonical_tensors()])
    with learner._reference.in_place():
        live = torch.cat([t.flatten() for _, t in policy.canonical_tensors()])
        inside = torch.cat([p.data.flatten() for p in policy.gpt.parameters()])
    assert not torch.equal(live, initial), (
        "a publication reads the live weights also while the reference is in place"
    )
    assert torch.equal(inside, torch.cat([p.data.flatten() for p in MegatronPolicy(config).gpt.parameters()]))


@pytest.mark.parametrize("in_reward", [False, True])
def test_tokens_at_the_bound_of_k3_are_counted(in_reward: bool, tied_model: Path, world: None) -> None:
    """In the metrics of a step, whether the estimate is in the loss or in the reward; none at the usual bound
    of 10 nats."""
    for largest, counted in ((10.0, False), (1e-9, True)):
        config = tiny.make_config(
            tied_model,
            algorithm__kl_coefficient=0.1,
            algorithm__kl_in_reward=in_reward,
            algorithm__kl_k3_max=largest,
            optimizer__lr=1e-2,
        )
        learner = Learner(config, MegatronPolicy(config))
        for step in range(2):
            batch = tiny.make_batch(seed=step)
            metrics = learner.train(tiny.step_batch(batch), step, lambda: None)
        assert (metrics["kl_bounded_tokens"] > 0) == counted
        assert metrics["kl_bounded_tokens"] <= sum(sum(t.loss_mask) for t in batch)
        assert (metrics["kl"] <= 1.001e-9) == counted


def test_a_trajectory_left_out_cannot_spoil_the_update(tied_model: Path, world: None) -> None:
    """A behaviour log-prob of minus infinity makes the ratio infinite: with a bound the trajectory is left
    out, and the update is that of the others."""
    batch = tiny.make_batch(seed=31)
    batch[3].logprobs[0] = -float("inf")
    for largest, skipped in ((None, 1), (10.0, 0)):
        config = tiny.make_config(tied_model, algorithm__sequence_ratio_max=largest)
        policy = MegatronPolicy(config)
        metrics = Learner(config, policy).train(tiny.step_batch(batch), 0, lambda: None)
        assert metrics["skipped_updates"] == skipped
        assert all(torch.isfinite(t).all() for _, t in policy.canonical_tensors())
    total = sum(sum(t.loss_mask) for t in batch)
    assert (
        metrics["left_out_fraction"] == pytest.approx(sum(batch[3].loss_mask) / total)
        and metrics["ratio_max"] < 100
    )
