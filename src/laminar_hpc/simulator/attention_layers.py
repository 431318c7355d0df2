"""What a layer's attention holds and reads, by its kind: heads that share keys and values, latent attention
(DeepSeek-V2, arXiv 2405.04434), and layers of linear attention whose state has one size at any length (gated
delta rule, arXiv 2412.06464), of which a hybrid has several for each full one. From a config.json alone."""

from dataclasses import dataclass
from typing import Any

from laminar_hpc.config.models import head_size, kv_heads

_WIDTH = 2  # bytes of a bfloat16
_STATE_WIDTH = 4  # bytes of a float32, in which states are kept
# what a layer_types may say, and the keys by which other families say that some layers are something else
_KNOWN_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
_OTHER_LAYERS = ("hybrid_override_pattern", "attn_layer_period", "attn_type_list", "layers_block_type")


@dataclass(frozen=True)
class AttentionShape:
    """Of a whole model. `parameters`: of all its attention. `full`: layers with a KV cache. `kv_values`: of a
    token in one of them; `kv_heads`: over which tensor parallelism divides them. `width`: over which a token
    scores and sums another one, in training; `kv_flops`: of a cached one in one layer, in decoding.
    `state_bytes`: of a request, whatever its length."""

    parameters: float
    full: int
    kv_values: int
    kv_heads: int
    width: float
    kv_flops: float
    state_bytes: float = 0.0


def attention_of(c: dict[str, Any]) -> AttentionShape:
    """From its config.json. Raises KeyError for what is missing."""
    layers, linear = c["num_hidden_layers"], linear_layers(c)
    full = layers - linear
    per_layer, kv, heads, width, kv_flops = _latent(c) if c.get("kv_lora_rank") else _shared(c)
    state, of_linear = _linear(c) if linear else (0.0, 0.0)
    return AttentionShape(
        parameters=full * per_layer + linear * of_linear,
        full=full,
        kv_values=kv,
        kv_heads=heads,
        width=width,
        kv_flops=kv_flops,
        state_bytes=linear * state,
    )


def unknown_layers(c: dict[str, Any]) -> str:
    """The key of a config.json that tells of layers that are counted here as what they are not, and what it
    says; empty where there are none."""
    others = {kind for kind in c.get("layer_types") or () if kind not in _KNOWN_LAYERS}
    if others:
        return f"layer_types: {', '.join(sorted(map(str, others)))}"
    return next((key for key in _OTHER_LAYERS if c.get(key)), "")


def linear_layers(c: dict[str, Any]) -> int:
    """Layers without a KV cache, by `layer_types` or by every how many layers have one."""
    if types := c.get("layer_types"):
        return sum(kind == "linear_attention" for kind in types)
    every = int(c.get("full_attention_interval") or 1)
    return int(c["num_hidden_layers"]) - int(c["num_hidden_layers"]) // every


def _shared(c: dict[str, Any]) -> tuple[float, int, int, float, float]:
    """Parameters of a layer, values of a token's KV, heads that divide them, training's width, and FLOPs for
    each cached token: a product for its score and one for its sum, in each query head."""
    queries = c["num_attention_heads"] * head_size(c)
    gate = queries if c.get("attn_output_gate", linear_layers(c) > 0) else 0
    parameters = c["hidden_size"] * (2.0 * queries + gate + 2 * kv_heads(c) * head_size(c))
    return parameters, 2 * kv_heads(c) * head_size(c), kv_heads(c), float(queries), 4.0 * queries


def _latent(c: dict[str, Any]) -> tuple[float, int, int, float, float]:
    """The same: the latent is one for all heads, and every head scores it whole and sums it without its
    rotated part."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    latent, rotated = c["kv_lora_rank"], c["qk_rope_head_dim"]
    key, value = c["qk_nope_head_dim"] + rotated, c["v_head_dim"]
    rank = c.get("q_lora_rank")
    query = rank * (hidden + heads * key) if rank else hidden * heads * key
    up = latent * heads * (c["qk_nope_head_dim"] + value)
    parameters = float(query + up + hidden * (latent + rotated) + heads * value * hidden)
    return parameters, latent + rotated, 1, heads * (key + value) / 2, 2.0 * heads * (2 * latent + rotated)


def _linear(c: dict[str, Any]) -> tuple[float, float]:
    """Bytes of a request's state in one layer, and the layer's parameters."""
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    taps = c.get("linear_conv_kernel_dim", 4)
    inner = 2 * keys + values
    state = values * c["linear_key_head_dim"] * _STATE_WIDTH + inner * (taps - 1) * _WIDTH
    gates = 2 * c["linear_num_value_heads"]
    parameters = c["hidden_size"] * (inner + values + gates) + inner * taps + values * c["hidden_size"]
    return float(state), float(parameters)
