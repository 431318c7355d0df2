"""The memory estimate's activations against what Megatron's layers really keep for the backward pass."""

from pathlib import Path

import pytest
import torch

from helpers.trainer import tiny
from laminar_hpc.config.models import trainer_bytes
from laminar_hpc.trainer.megatron.cpu import cuda_as_cpu
from laminar_hpc.trainer.megatron.packs import make_pack
from laminar_hpc.trainer.megatron.policy import MegatronPolicy

HIDDEN, FFN, TOKENS = 128, 512, 256


def kept_bytes(folder: Path, layers: int, recompute: str) -> int:
    """Bytes of all tensors, parameters aside, that autograd keeps in the forward pass of one micro-batch in
    bfloat16."""
    model = tiny.make_model(
        folder / f"{layers}",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    policy = MegatronPolicy(
        tiny.make_config(model, model__dtype="bfloat16", trainer__recompute_activations=recompute)
    )
    pack = make_pack([[1 + i % 40 for i in range(TOKENS)]], [range(1, TOKENS)], policy.device)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.gpt.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in parameters:
            seen[place] = tensor
        return tensor

    with cuda_as_cpu(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.gpt.train()
        policy._forward(pack)
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_of_a_layer(recompute: str, tmp_path: Path, world: None) -> None:
    """Promise: full recomputation keeps a layer's input in float32, 4 bytes per value also in bfloat16. Else
    the estimate is what the layers keep but for what only the CPU does: its norms and its activation keep a
    copy more each."""
    few, more = 2, 5
    found = (
        (kept_bytes(tmp_path, more, recompute) - kept_bytes(tmp_path, few, recompute))
        / (more - few)
        / (TOKENS - 1)
    )
    shape = {
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": FFN,
        "vocab_size": 1,
    }
    trainer = tiny.make_config(tmp_path, trainer__recompute_activations=recompute).trainer

    def estimate(layers: int, tokens: int) -> int:
        trainer.tokens_per_microbatch = tokens
        return trainer_bytes({**shape, "num_hidden_layers": layers}, 2, trainer)

    predicted = (
        (estimate(more, 2000) - estimate(few, 2000) - estimate(more, 1000) + estimate(few, 1000))
        / (more - few)
        / 1000
    )
    if recompute == "full":
        assert found == pytest.approx(4 * HIDDEN, rel=0.02) and predicted == pytest.approx(
            4 * HIDDEN, rel=0.01
        )
    else:
        cpu_only = 2 * 4 * HIDDEN + (2 * FFN if recompute == "none" else 0)
        assert found - cpu_only == pytest.approx(predicted, rel=0.1)
