"""An engine's tensor-parallel ranks without a server: parameters named, fused, padded and split as SGLang's
for a Qwen2, or for a Qwen3-MoE whose ranks divide whole experts, loaded from a slot by the plugin's own
loader."""

import json
from types import SimpleNamespace

import torch

from laminar_hpc.engine.sglang.plugin.live_weights import canonical_views, live_layout, live_sums
from laminar_hpc.engine.sglang.plugin.load_slot import load_slot
from laminar_hpc.engine.sglang.shards import whole_sums, whole_tensors
from laminar_hpc.weights.slots import SlotHandle


def shapes(c: SimpleNamespace, size: int) -> dict[str, tuple[int, ...]]:
    """Of one rank of `size`; heads and key-value heads divide by it."""
    head = c.head_dim or c.hidden_size // c.num_attention_heads
    fused = (c.num_attention_heads + 2 * c.num_key_value_heads) * head // size
    found = {
        "model.embed_tokens.weight": ((c.vocab_size + 63) // 64 * 64 // size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_hidden_layers):
        of_layer = {
            "self_attn.qkv_proj.weight": (fused, c.hidden_size),
            "self_attn.qkv_proj.bias": (fused,),
            "self_attn.o_proj.weight": (c.hidden_size, c.hidden_size // size),
            "mlp.gate_up_proj.weight": (2 * c.intermediate_size // size, c.hidden_size),
            "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size // size),
            "input_layernorm.weight": (c.hidden_size,),
            "post_attention_layernorm.weight": (c.hidden_size,),
        }
        if experts := getattr(c, "num_local_experts", 0):
            for name in ("self_attn.qkv_proj.bias", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"):
                del of_layer[name]
            of_layer |= {
                "mlp.gate.weight": (experts, c.hidden_size),
                "mlp.experts.w13_weight": (experts // size, 2 * c.moe_intermediate_size, c.hidden_size),
                "mlp.experts.w2_weight": (experts // size, c.hidden_size, c.moe_intermediate_size),
                "self_attn.q_norm.weight": (head,),
                "self_attn.k_norm.weight": (head,),
            }
        found |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    if not c.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


class Rank:
    """In the place of SGLang's model."""

    def __init__(self, config: SimpleNamespace, size: int) -> None:
        self._parameters = {
            name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes(config, size).items()
        }

    def named_parameters(self):
        return self._parameters.items()

    def get_submodule(self, name: str) -> torch.nn.Module:
        """Embeddings and heads are split by rows, and so no torch.nn.Embedding."""
        return torch.nn.Module()


def load(slot: SlotHandle, size: int) -> None:
    """Into all ranks of an engine of `size`; what they then hold together must be what the slot's manifest
    says."""
    config = SimpleNamespace(**json.loads((slot.directory / "config.json").read_text()))
    config.head_dim = getattr(config, "head_dim", None)
    ranks = [list(canonical_views(Rank(config, size), config, rank, size, size)) for rank in range(size)]
    loaded = [load_slot(views, slot.directory) for views in ranks]
    assert loaded == [live_sums(views) for views in ranks]
    layouts, entries = [live_layout(views) for views in ranks], slot.manifest.tensors
    assert {t.name: tuple(t.shape) for t in whole_tensors(layouts)} == {
        e.name: tuple(e.shape) for e in entries
    }
    assert whole_sums(layouts, loaded) == {e.name: (e.sum_words, e.sum_indexed) for e in entries}
