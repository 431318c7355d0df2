"""A low-rank adapter as PEFT writes it: the names, shapes and order of its tensors in
adapter_model.safetensors, and what its adapter_config.json says. Imports no torch.

These tensors are what a run with model.lora.rank publishes and keeps in its checkpoints; the model's own
weights are read from model.path by trainer and engine alike, and never change.
"""

from pathlib import Path

from laminar_hpc.config.adapters import TARGETS, Projection, Widths, adapter_tensors
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.data.pretrained import recorded_name
from laminar_hpc.weights.hf import ModelShape


def _widths(shape: ModelShape) -> Widths:
    return Widths(shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn)


def adapted(shape: ModelShape, lora: LoraConfig) -> list[Projection]:
    """The linear layers of a decoder layer that have an adapter."""
    return _widths(shape).projections(lora.targets)


def adapter_layout(shape: ModelShape, lora: LoraConfig) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape of each tensor: A [rank, inputs] and B [outputs, rank] of each module, layer by layer.
    The order is that of a publication."""
    return adapter_tensors(_widths(shape), shape.layers, lora)


def adapter_scale(lora: LoraConfig) -> float:
    """What B A x is multiplied by."""
    return lora.alpha / lora.rank


def adapter_config(lora: LoraConfig, base: str) -> dict[str, object]:
    """The object in adapter_config.json, which PEFT and SGLang read. `base` is the directory of the model
    that the adapter belongs to; a folder of the hub's cache is named as the hub names it."""
    named = recorded_name(base)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": named.repo if named else str(Path(base).resolve()),
        "revision": named.revision if named else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "target_modules": list(TARGETS[lora.targets]),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": "gaussian" if lora.init == "gaussian" else True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
