"""What an adapter's tensors are to be."""

from laminar_hpc.config.adapters import Widths, adapter_tensors
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.weights.hf import ModelShape


def adapter_layout(shape: ModelShape, lora: LoraConfig) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape of each tensor: A [rank, inputs] and B [outputs, rank] of each module, layer by layer.
    The order is that of a publication."""
    widths = Widths(shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn)
    return adapter_tensors(widths, shape.layers, lora)
