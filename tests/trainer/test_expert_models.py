"""A mixture of experts on one rank computes what transformers computes, before and after training."""

from pathlib import Path

import pytest
from test_model_equals_transformers import logits_by_megatron, logits_by_transformers, sequences

from helpers.trainer import tiny
from helpers.trainer.checkpointing import save_hf
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("family", tiny.EXPERTS)
def test_logits_of_experts_equal_transformers_both_ways(family: str, tmp_path: Path) -> None:
    """To 1e-4 in float32 from a Hugging Face directory, and after a step of training from the one that is
    written; the router has learned."""
    directory = tiny.make_model(tmp_path / "model", **tiny.EXPERTS[family])
    policy = MegatronPolicy(tiny.make_config(directory, optimizer__lr=1e-2))
    before = logits_by_megatron(policy, sequences())
    assert (before - logits_by_transformers(directory, sequences())).abs().max() < 1e-4
    Learner(policy.config, policy).train(tiny.step_batch(tiny.make_batch(seed=1)), 0, lambda: None)
    save_hf(policy, tmp_path / "hf")
    after = logits_by_megatron(policy, sequences())
    assert (after - before).abs().max() > 1e-2
    assert (after - logits_by_transformers(tmp_path / "hf", sequences())).abs().max() < 1e-4
    old, new = tiny.published(directory), tiny.published(tmp_path / "hf")
    assert old.keys() == new.keys()
    assert all((new[name] - old[name]).abs().max() > 1e-3 for name in old if ".gate." in name)


def test_recomputation_changes_no_gradient_of_experts(tmp_path: Path) -> None:
    """All-to-all and routing are done again in the backward pass, and give the same."""
    directory = tiny.make_model(tmp_path / "model", **tiny.EXPERTS["qwen2-moe"])
    gradients = []
    for choice in ("none", "selective", "full"):
        config = tiny.make_config(directory, trainer__recompute_activations=choice, optimizer__lr=0.0)
        policy = MegatronPolicy(config)
        Learner(config, policy).train(tiny.step_batch(tiny.make_batch(seed=1)), 0, lambda: None)
        gradients.append({name: p.main_grad.clone() for name, p in policy.gpt.named_parameters()})
    none, *again = gradients
    assert all((none[name] - other[name]).abs().max() < 1e-7 for other in again for name in none)
    assert none["decoder.layers.0.mlp.router.weight"].abs().max() > 1e-4


def test_bfloat16_experts_stay_close_to_float32(tmp_path: Path) -> None:
    """The router is float32 in a bfloat16 model too: log-probs differ by roundings, and where another expert
    is chosen."""
    directory = tiny.make_model(tmp_path / "model", **tiny.EXPERTS["qwen3-moe"])
    policy = MegatronPolicy(tiny.make_config(directory, model__dtype="bfloat16"))
    assert policy.transformer.moe_router_dtype == "fp32"
    found = logits_by_megatron(policy, sequences()).log_softmax(-1)
    expected = logits_by_transformers(directory, sequences()).log_softmax(-1)
    assert (found - expected).abs().mean() < 0.02
