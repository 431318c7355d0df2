"""docs/promises.md#loss-mask: of a token that the environment gave nothing is trained; it is context."""

import copy
import math
from pathlib import Path

import pytest
import torch

from helpers.made import Made
from helpers.trainer import tiny
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.step.microbatch import make_microbatch, trained

OPTIONS: dict[str, dict[str, object]] = {
    "grpo": {},
    "kl": {"kl_coefficient": 0.1, "proximal": "recomputed", "importance_weight_cap": 2.0},
    "reward": {"advantage": "reinforce_pp", "kl_coefficient": 0.1, "kl_in_reward": True},
    "gspo": {"loss": "gspo", "loss_aggregation": "sequences", "sequence_ratio_max": 3.0},
    "overlong": {"overlong_buffer_tokens": 16, "loss_aggregation": "constant"},
}


def batches() -> tuple[list[Made], list[Made]]:
    """The same trajectories, half of whose tokens were given; in the second with log-probs there that would
    show anywhere."""
    batch = tiny.make_batch(seed=31)
    for t in batch:
        t.loss_mask = [int(i % 4 < 2) for i in range(len(t.response_tokens))]
        t.logprobs = [p if m else 0.0 for p, m in zip(t.logprobs, t.loss_mask, strict=True)]
    other = copy.deepcopy(batch)
    for t in other:
        t.logprobs = [p if m else math.nan for p, m in zip(t.logprobs, t.mask, strict=True)]
    return batch, other


@pytest.mark.parametrize("name", OPTIONS)
def test_log_probs_of_given_tokens_are_never_read(name: str, tied_model: Path, world: None) -> None:
    """Every metric, every trajectory's gap and every weight after two updates are the same, bit for bit,
    with NaN in their place: losses, ratios, KL, entropy, gaps and lengths do not know them."""
    settings = {f"algorithm__{key}": value for key, value in OPTIONS[name].items()}
    config = tiny.make_config(
        tied_model, algorithm__minibatches_per_step=2, sampling__max_response_tokens=32, **settings
    )
    found = []
    for batch in batches():
        learner = Learner(config, MegatronPolicy(config))
        metrics = learner.train(tiny.step_batch(batch), 0, lambda: None)
        assert all(map(math.isfinite, metrics.values())) and metrics["skipped_updates"] == 0
        assert metrics["grad_norm"] > 0
        after = {n: t.cpu().clone() for n, t in learner.policy.canonical_tensors()}
        found.append((metrics, learner.mismatches, after))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(t, found[1][2][n]) for n, t in found[0][2].items())


def test_the_model_is_asked_for_drawn_tokens_only(tied_model: Path, world: None) -> None:
    """A pack's targets are exactly the trained tokens, and a pack of given tokens alone has a gradient of
    exactly zero."""
    policy = MegatronPolicy(tiny.make_config(tied_model))
    batch = batches()[0][:3]
    [one, *_], learner = tiny.examples(batch), Learner(policy.config, policy)
    wanted = [t for t, m in zip(batch[0].response_tokens, batch[0].mask, strict=True) if m]
    assert make_microbatch([one], policy.device).pack.targets.tolist() == wanted
    assert len(trained(one.text)) == len(wanted) < len(batch[0].response_tokens)
    for t in batch:
        t.loss_mask = [0] * len(t.response_tokens)
    policy.accumulate([make_microbatch(tiny.examples(batch, [5.0] * 3), policy.device)], learner._loss)
    assert all(not p.main_grad.any() for p in policy.gpt.parameters())
