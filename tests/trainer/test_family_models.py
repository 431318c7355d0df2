"""What is special of a family, on one rank: logits are transformers' before and after training."""

from pathlib import Path

import pytest
from test_model_equals_transformers import logits_by_megatron, logits_by_transformers, sequences

from helpers.trainer import tiny
from helpers.trainer.checkpointing import save_hf
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

pytestmark = pytest.mark.usefixtures("world")
SPECIAL = [
    "mistral-nemo",
    "mistral-window",
    "qwen2-yarn",
    "qwen3-yarn",
    "llama-linear",
    "glm4",
    "glm4-yarn",
    "gemma3",
]


@pytest.mark.parametrize("family", SPECIAL)
def test_logits_equal_transformers_both_ways(family: str, tmp_path: Path) -> None:
    """To 1e-4 in float32 from a Hugging Face directory, and after a step of training from the one that is
    written, whose tensors are those that were read."""
    directory = tiny.make_model(tmp_path / "model", **tiny.FAMILIES[family])
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


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("mistral-window", {"sliding_window": None}),
        ("qwen3-yarn", {"rope_parameters": tiny.YARN}),
        ("gemma3", {"layer_types": ["full_attention"] * 4}),
        ("gemma3", {"query_pre_attn_scalar": 16}),
        ("qwen2-yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ],
)
def test_what_is_special_makes_a_difference(family: str, without: dict, tmp_path: Path) -> None:
    """Else the comparison above proved nothing: without it logits are others."""
    plain, special = (
        tiny.make_model(tmp_path / name, **{**tiny.FAMILIES[family], **changes})
        for name, changes in (("plain", without), ("special", {}))
    )
    difference = logits_by_transformers(plain, sequences()) - logits_by_transformers(special, sequences())
    assert difference.abs().max() > 1e-2
