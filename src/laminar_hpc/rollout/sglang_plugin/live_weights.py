"""The engine's live parameters under their Hugging Face names and shapes, and their check sums.

SGLang fuses q/k/v and gate/up projections and pads the vocabulary; this undoes both by views, so that sums of the live weights compare
with those of the canonical tensors (ARCHITECTURE 4). One process per engine (tensor parallel size 1).
"""

from collections.abc import Iterator

import torch

from laminar_hpc.rollout.sglang_plugin.protocol import TensorLayout
from laminar_hpc.weights.sums import tensor_sums


def canonical_views(model: torch.nn.Module, config: object) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, live tensor in its Hugging Face shape). `config` is the model's Hugging Face config. A tied head is left out."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    qkv = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    for name, parameter in model.named_parameters():  # lists a tied head once, as the embedding
        tensor = parameter.detach()
        if ".qkv_proj." in name:
            for part, piece in zip("qkv", tensor.split(qkv), strict=True):
                yield name.replace("qkv_proj", f"{part}_proj"), piece
        elif ".gate_up_proj." in name:
            for part, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj"), piece
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield name, tensor[: config.vocab_size]
        else:
            yield name, tensor


def live_layout(model: torch.nn.Module, config: object) -> list[TensorLayout]:
    return [TensorLayout(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in canonical_views(model, config)]


def live_sums(model: torch.nn.Module, config: object) -> dict[str, tuple[int, int]]:
    """Sums over the parameters as they are in memory now."""
    return {name: tensor_sums(tensor) for name, tensor in canonical_views(model, config)}
