"""A decoder layer of Qwen2 in few calls: SGLang's own arithmetic without the modules around each operation,
for engines on the CPU.

With small models most of a step is Python: a dozen nested modules per layer, each with its dispatch. Hooked
in by hooks.py. Layers that are more than their plain form (quantized, split over processes, other
residuals) are computed by SGLang's own code.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from laminar_hpc.engine.sglang.plugin.cpu_functions import rotated, rotation


def _is_plain(layer: Any) -> bool:
    """Whether the layer is Qwen2's arithmetic and nothing else, in float32, whole in this process."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    attention, mlp = layer.self_attn, layer.mlp
    modules = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    linears = [getattr(module, "base_layer", module) for module in modules]
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(
            type(part.quant_method) is UnquantizedLinearMethod
            and part.weight.dtype is torch.float32
            and part.tp_size == 1
            for part in linears
        )
        and all(
            type(norm) is RMSNorm and norm.variance_size_override is None and not norm.cast_x_before_out_mul
            for norm in norms
        )
        and type(attention.rotary_emb).forward_native is RotaryEmbedding.forward_native
        and attention.rotary_emb.is_neox_style
        and attention.rotary_emb.rotary_dim == attention.head_dim
    )


def decoder_layer(
    original: Callable,
    layer: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: Any,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hook around Qwen2DecoderLayer.forward. positions: [tokens]; hidden_states, residual: [tokens, hidden];
    returns the next two."""
    plain = layer.__dict__.get("laminar_plain")
    if plain is None:
        plain = layer.__dict__["laminar_plain"] = _is_plain(layer)
    if not plain:
        return original(layer, positions, hidden_states, forward_batch, residual)
    modules = layer._modules
    attention, mlp = modules["self_attn"], modules["mlp"]
    residual = hidden_states if residual is None else residual + hidden_states
    x = _norm(modules["input_layernorm"], residual)
    x = _linear(attention.qkv_proj, x)
    qk, v = x.split([attention.q_size + attention.kv_size, attention.kv_size], dim=-1)
    qk = rotated(qk.contiguous(), rotation(attention.rotary_emb, positions))
    q, k = qk.split([attention.q_size, attention.kv_size], dim=-1)
    x = _linear(attention.o_proj, attention.attn(q.contiguous(), k, v, forward_batch))
    residual = residual + x
    x = _linear(mlp.gate_up_proj, _norm(modules["post_attention_layernorm"], residual))
    gate, up = x.chunk(2, dim=-1)
    return _linear(mlp.down_proj, silu(gate).mul_(up)), residual


def _linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    base = module._modules.get("base_layer", module)  # of one that SGLang has wrapped for adapters
    parameters = base._parameters
    out = linear(x, parameters["weight"], parameters.get("bias"))
    return out if base is module or not module.lora_active else module.apply_lora(out, x)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, (x.shape[-1],), module._parameters["weight"], module.variance_epsilon)
