"""A low-rank adapter as PEFT writes it: the names, shapes and order of its tensors in
adapter_model.safetensors, and what its adapter_config.json says. Imports no torch.

These tensors are what a run with model.lora.rank publishes and keeps in its checkpoints; the model's own
weights are read from model.path by trainer and engine alike, and never change.
"""

import json
from pathlib import Path

from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE, TARGETS, Projection, Widths
from laminar_hpc.config.schema import LoraConfig, RunConfig
from laminar_hpc.data.pretrained import recorded_name
from laminar_hpc.weights.hf import ModelShape


def adapted(shape: ModelShape, lora: LoraConfig) -> list[Projection]:
    """The linear layers of a decoder layer that have an adapter."""
    widths = Widths(shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn)
    return widths.projections(lora.targets)


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


def side_files(config: RunConfig) -> dict[str, bytes] | None:
    """What lies beside an adapter in its slot, by name; None where a run publishes full weights, whose slots
    have the files of model.path."""
    if config.model.lora.rank == 0:
        return None
    settings = adapter_config(config.model.lora, config.model.path)
    return {ADAPTER_CONFIG_FILE: json.dumps(settings, indent=1).encode()}
