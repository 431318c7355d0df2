"""Megatron parameters of a low-rank adapter <-> the tensors that PEFT has of it, as weights/mapping.py has
them of a model. Used by trainer/megatron/loading.py.
"""

import torch

from laminar_hpc.config.adapters import adapter_name
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.weights.adapters import adapted
from laminar_hpc.weights.hf import ModelShape
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.layouts import Layout, Shard, columns, rows, whole
from laminar_hpc.weights.mapping import slices_of

# Megatron's layer of a module, and how A and B lie in its parameters
_OUTPUTS_SPLIT: tuple[Layout, Layout] = (whole, rows)
_INPUTS_SPLIT: tuple[Layout, Layout] = (columns, whole)
_LAYERS = {
    "q_proj": ("self_attention.linear_qkv", _OUTPUTS_SPLIT),
    "k_proj": ("self_attention.linear_qkv", _OUTPUTS_SPLIT),
    "v_proj": ("self_attention.linear_qkv", _OUTPUTS_SPLIT),
    "o_proj": ("self_attention.linear_proj", _INPUTS_SPLIT),
    "gate_proj": ("mlp.linear_fc1", _OUTPUTS_SPLIT),
    "up_proj": ("mlp.linear_fc1", _OUTPUTS_SPLIT),
    "down_proj": ("mlp.linear_fc2", _INPUTS_SPLIT),
}


def adapter_slices(
    parameters: dict[str, torch.Tensor], shape: ModelShape, lora: LoraConfig, first_layer: int, shard: Shard
) -> list[LocalSlice]:
    """Every slice of an adapter's tensors that these local parameters hold, in the order of a publication.
    Arguments and errors are those of `mapping.local_slices`."""
    table: list[tuple[str, str, Layout]] = []
    for layer in range(len({name.split(".")[2] for name in parameters})):
        for module in (each.module for each in adapted(shape, lora)):
            name = module.partition(".")[2]
            place, layouts = _LAYERS[name]
            for half, lies in zip("AB", layouts, strict=True):
                own = f"decoder.layers.{layer}.{place}.adapter.{name}.lora_{half}"
                table.append((adapter_name(first_layer + layer, module, half), own, lies))
    return slices_of(table, parameters, shape, shard)
