"""The angles of RoPE, and its factors for the tokens of a pack, as transformers and SGLang compute them.
Called by trainer/megatron/policy.py; weights/kernels/layers.py applies the factors."""

import math
from dataclasses import replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from laminar_hpc.config.rope import LinearScaling, Llama3Scaling, YarnScaling
from laminar_hpc.weights.hf import ModelShape


def rope_frequencies(shape: ModelShape, windowed: bool = False) -> torch.Tensor:
    """Radians per token of each pair of a head's dimensions, [head_dim / 2] float32; 0 of those that are not
    turned. `windowed`: in layers with a window."""
    if windowed and shape.windows is not None and shape.windows.rope_theta is not None:
        shape = replace(shape, rope_theta=shape.windows.rope_theta, rope_scaling=None)
    turned = _turned_frequencies(shape)
    return torch.nn.functional.pad(turned, (0, shape.head_dim // 2 - len(turned)))


def _turned_frequencies(shape: ModelShape) -> torch.Tensor:
    scaling, dims = shape.rope_scaling, shape.rotary_dims or shape.head_dim
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if isinstance(scaling, Llama3Scaling):
        return llama3_frequencies(frequencies, scaling)
    if isinstance(scaling, YarnScaling):
        return yarn_frequencies(frequencies, scaling, shape.rope_theta)
    return frequencies / scaling.factor if isinstance(scaling, LinearScaling) else frequencies


def llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's RoPE, by how often a frequency turns within the original context: at most low_freq_factor
    times, it is divided by `factor`; at least high_freq_factor times, kept; between, interpolated linearly in
    the number of turns. [head_dim / 2] float32."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def yarn_frequencies(frequencies: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """YaRN's RoPE, as transformers has it (modeling_rope_utils.py, `_compute_yarn_parameters`): a frequency
    that turns beta_slow times within the original context is divided by `factor`, one that turns beta_fast
    times is kept, those between are interpolated linearly in their number. [head_dim / 2] float32."""
    pairs = len(frequencies)

    def number(turns: float) -> float:
        """Which frequency turns so often within the original context."""
        return pairs * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    first, last = number(scaling.beta_fast), number(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = (last - first) or 0.001
    divided = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return divided * frequencies / scaling.factor + (1 - divided) * frequencies


def rope_magnitude(shape: ModelShape) -> torch.Tensor:
    """What RoPE multiplies each pair of a head's dimensions with, beside turning it, [head_dim / 2]
    float32."""
    magnitude = torch.ones(shape.head_dim // 2)
    if isinstance(shape.rope_scaling, YarnScaling):
        magnitude[: (shape.rotary_dims or shape.head_dim) // 2] = shape.rope_scaling.attention_factor
    return magnitude


def in_halves(config: TransformerConfig, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries and keys [tokens, heads, d] whose dimensions 2i and 2i + 1 RoPE turns, in the order in which it
    turns i and i + d / 2; both alike, so that their products stay what they are. As they are where RoPE turns
    halves."""
    if not config.rotary_interleaved:
        return heads
    return tuple(x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2) for x in heads)


def rotation_of(
    frequencies: torch.Tensor, positions: torch.Tensor, magnitude: float | torch.Tensor = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's two factors at `positions` [tokens], float32 [tokens, 1, head_dim]: the cosine, and the sine
    with the sign of its half, both times `magnitude`, a number or, as frequencies, [head_dim / 2] float32.
    Megatron's own RoPE rounds the factors and each product to the dtype of what it rotates."""
    angles = torch.outer(positions.to(frequencies.dtype), frequencies)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
