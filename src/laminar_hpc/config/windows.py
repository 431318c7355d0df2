"""Sliding windows of attention: which layers of a model have one, and how long it is. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """A token of a layer with a window attends to the last `size` tokens, itself among them. `layers`: of
    each layer, whether it has one."""

    size: int
    layers: tuple[bool, ...]


def windows_of(model: dict) -> Windows | None:
    """From a config.json; None where every layer attends to all tokens. What is left out stands for what
    transformers takes then: Mistral, 4096 tokens in every layer."""
    size = model.get("sliding_window", 4096) if model.get("model_type") == "mistral" else None
    return Windows(size, (True,) * model["num_hidden_layers"]) if size else None
