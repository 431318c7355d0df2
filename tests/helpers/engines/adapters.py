"""Adapters for tests of engines: random ones for a model's directory, in slots, and merged into its
weights."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from laminar_hpc.config.adapters import ADAPTER_PREFIX
from laminar_hpc.config.models import SIDE_FILES, WEIGHTS_FILE
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.slots import SlotWriter

RANK, ALPHA = 4, 12.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def adapter_of(model: Path, seed: int, targets: tuple[str, ...] = ALL, rank: int = RANK) -> Tensors:
    """A random adapter under PEFT names, in the weights' dtype, large enough to change every log-prob."""
    draw = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, weight in load_file(model / WEIGHTS_FILE).items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in targets:
            outputs, inputs = weight.shape
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(shape, generator=draw) * 0.1
                found[f"{ADAPTER_PREFIX}{module}.lora_{half}.weight"] = values.to(weight.dtype)
    return found


def slot_writer(folder: Path, model: Path, slots: int = 4, rank: int = RANK) -> SlotWriter:
    """A ring of adapters."""
    config = {"r": rank, "lora_alpha": ALPHA, "peft_type": "LORA", "target_modules": list(ALL)}
    return SlotWriter(
        str(folder), "adapters", slots, model, {"adapter_config.json": json.dumps(config).encode()}
    )


def fill_adapter_slot(writer: SlotWriter, tensors: Tensors, weight_id: int) -> tuple[Path, Manifest]:
    """What a relay does with the adapter that a trainer publishes."""
    manifest = layout([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], weight_id, weight_id)
    data = writer.begin(manifest)
    for entry in manifest.tensors:
        raw = tensors[entry.name].contiguous().view(torch.uint8).numpy().tobytes()
        data[entry.offset : entry.offset + entry.nbytes] = np.frombuffer(raw, dtype=np.uint8)
        entry.sum_words, entry.sum_indexed = tensor_sums(tensors[entry.name])
    return writer.commit(manifest), manifest


def manifest_sums(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """The sums that the engine must find."""
    return {entry.name: (entry.sum_words, entry.sum_indexed) for entry in manifest.tensors}


def merged(model: Path, tensors: Tensors, folder: Path, rank: int = RANK) -> Path:
    """The model with the adapter in its weights: W + alpha / rank * B A."""
    weights = load_file(model / WEIGHTS_FILE)
    for name in list(tensors):
        if name.endswith(".lora_A.weight"):
            a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix(ADAPTER_PREFIX).replace(".lora_A", "")
            weights[target] = weights[target] + ALPHA / rank * (b @ a)
    folder.mkdir()
    save_file(weights, folder / WEIGHTS_FILE, {"format": "pt"})
    for name in SIDE_FILES:
        if (model / name).exists():
            (folder / name).write_bytes((model / name).read_bytes())
    return folder
