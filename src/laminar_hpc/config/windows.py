"""Sliding windows of attention: which layers of a model have one, and how long it is. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """A token of a layer with a window attends to the last `size` tokens, itself among them. `layers`: of
    each layer, whether it has one. `rope_theta`: RoPE's base in these layers, None: that of all others."""

    size: int
    layers: tuple[bool, ...]
    rope_theta: float | None = None


def windows_of(model: dict) -> Windows | None:
    """From a config.json; None where every layer attends to all tokens. What is left out stands for what
    transformers takes then: windows of 4096 tokens, in Gemma-3 but for each sixth layer."""
    size, layers = model.get("sliding_window", 4096), model.get("num_hidden_layers", 0)
    if not size or model.get("model_type") not in ("mistral", "gemma3_text"):
        return None
    if model["model_type"] == "mistral":
        return Windows(size, (True,) * layers)
    kinds, period = model.get("layer_types"), model.get("sliding_window_pattern", 6)
    nested = (model.get("rope_parameters") or {}).get("sliding_attention") or {}
    return Windows(
        size,
        tuple(kinds[i] == "sliding_attention" if kinds else bool((i + 1) % period) for i in range(layers)),
        float(nested.get("rope_theta") or model.get("rope_local_base_freq") or 10000.0),
    )
