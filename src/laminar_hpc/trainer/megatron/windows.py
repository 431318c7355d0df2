"""Sliding windows of attention in the trainer: what Megatron-core is told of them, and how they are put to
torch's kernels. Used by trainer/megatron/building.py and attention.py; Transformer Engine's attention reads
Megatron's settings itself."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from laminar_hpc.config.windows import Windows


def window_settings(windows: Windows | None) -> dict[str, object]:
    """Fields of Megatron's TransformerConfig. Its window counts the tokens before a token, without itself."""
    if windows is None:
        return {}
    return {
        "window_size": (windows.size - 1, 0),
        "window_attn_skip_freq": [int(windowed) for windowed in windows.layers],
    }


def tokens_before(config: TransformerConfig, layer_number: int) -> int | None:
    """How many tokens before it a token of this layer, counted from 1, attends to; None: all."""
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return config.window_size[0] if windowed else None


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, before: int | None
) -> torch.Tensor:
    """query [sequences, heads, length, d], key and value [sequences, kv_heads, length, d] -> as query. These
    kernels of torch know no window, so where it cuts anything they take a mask."""
    length, mask = query.shape[2], None
    if before is not None and before + 1 < length:
        near = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = near.tril().triu(-before)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
