"""RoPE as a config.json has it: its scaling, and how many positions a model has with it. Imports no torch.

What is read here is what transformers 5 makes of the same file (modeling_rope_utils.py); the trainer computes
it in trainer/megatron/rope.py, and engine/sglang/overrides.py tells SGLang of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

PLAIN = ("default", None)


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class LinearScaling:
    """All wavelengths are stretched by `factor` (Chen et al., arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """As Llama 3's, by how often a frequency turns in the original context, between `beta_slow` and
    `beta_fast` turns; queries and keys are multiplied by `attention_factor` (YaRN, Peng et al., arXiv
    2309.00071, sections 3.2 to 3.4). `truncate`: the bounds are rounded outwards to whole dimensions."""

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling


def rope_entries(model: dict) -> dict:
    """What a config.json says of RoPE: rope_scaling of transformers 4, before rope_parameters of
    transformers 5, as transformers takes them; where layers differ, of those that attend to all tokens."""
    found = dict(model.get("rope_scaling") or model.get("rope_parameters") or {})
    return dict(found.get("full_attention", found))


def scaling_of(model: dict) -> RopeScaling | None:
    """None for plain RoPE. Raises ValueError, with a sentence, for a kind that is not computed, and for
    entries that are missing or wrong."""
    rope = rope_entries(model)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in PLAIN:
        return None
    read = _READ.get(str(kind))
    if read is None:
        raise ValueError(
            f"RoPE of type {kind} is not supported; use a model with plain RoPE, or with one of type linear, "
            "llama3 or yarn"
        )
    try:
        return read(rope, _original(model, rope))
    except KeyError as error:
        raise ValueError(f"RoPE of type {kind} without {error}; download the model again") from None


def _original(model: dict, rope: dict) -> int:
    found = [model.get("original_max_position_embeddings"), rope.get("original_max_position_embeddings")]
    return int(next(filter(None, found), 0) or model.get("max_position_embeddings") or 32768)


def _number(rope: dict, key: str, least: float = 0.0, default: float | None = None) -> float:
    """A number of at least `least`; `default` where there is none, or null. Raises ValueError, KeyError."""
    value = rope[key] if default is None else rope.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"RoPE with {key}={value!r}, which is no number of {least:g} or more")
    return float(value)


def _llama3(rope: dict, original: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_positions=original,
    )


def _linear(rope: dict, original: int) -> LinearScaling:
    return LinearScaling(_number(rope, "factor", 1.0))


def _yarn(rope: dict, original: int) -> YarnScaling:
    factor = _number(rope, "factor", 1.0)
    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    attention = magnitude(factor)
    if scale and all_dim:
        attention = magnitude(factor, scale) / magnitude(factor, all_dim)
    return YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=_number(rope, "attention_factor", default=attention),
        beta_fast=_number(rope, "beta_fast", default=32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", default=1.0) or 1.0,
        truncate=bool(rope.get("truncate", True)),
    )


_READ: dict[str, Callable[[dict, int], RopeScaling]] = {"llama3": _llama3, "linear": _linear, "yarn": _yarn}


def magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's temperature of the softmax, as a factor of queries and keys: equation 22."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def positions(model: dict) -> int | None:
    """Tokens that a sequence of the model may have; None where its config.json does not say. YaRN has at
    least `factor` times the original ones, whatever max_position_embeddings says. Attention by chunks, Qwen's
    dual_chunk_attention_config, is plain attention within the first chunk, and that is all that is computed.
    """
    said = model.get("max_position_embeddings")
    try:
        scaling = scaling_of(model)
    except ValueError:  # weights/hf.py refuses it
        return said
    if isinstance(scaling, YarnScaling):
        said = max(said or 0, int(scaling.factor * scaling.original_positions))
    if chunks := model.get("dual_chunk_attention_config"):
        first = chunks.get("chunk_size", 0) - chunks.get("local_size", 0)
        said = min(said or first, first) if first > 0 else said
    return said
