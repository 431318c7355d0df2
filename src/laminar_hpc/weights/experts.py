"""Where the tensors of a mixture of experts lie in Megatron's parameters: router, experts, and the expert
that all tokens share. weights/mapping.py has all others.

An expert-parallel rank holds whole experts, which follow on each other; with one such rank each expert is
split over the tensor-parallel ranks as a dense layer is.
"""

import torch

from laminar_hpc.weights.hf import ModelShape
from laminar_hpc.weights.layouts import Layout, Shard, columns, gate, up, whole

_MARK = ".experts."  # in the Hugging Face name of each tensor of a routed expert, and in no other


def is_expert(name: str) -> bool:
    """Whether the tensor of this Hugging Face name belongs to a routed expert."""
    return _MARK in name


def expert_rows(shape: ModelShape, shard: Shard) -> list[tuple[str, str, Layout]]:
    """Rows of one layer, in the order of a Hugging Face state dict; empty for a dense model. Megatron's names
    are those of SequentialMLP and of Transformer Engine's grouped products."""
    if shape.experts is None:
        return []
    block, *projections = shape.family.expert_names
    local = shape.experts.count // shard.expert_size
    rows: list[tuple[str, str, Layout]] = [(f"{block}.gate.weight", "mlp.router.weight", whole)]
    for number in range(local):
        name = f"{block}.experts.{shard.expert_rank * local + number}"
        sequential = f"mlp.experts.local_experts.{number}.linear_fc{{}}.weight"
        grouped = f"mlp.experts.linear_fc{{}}.weight{number}"
        for projection, of, layout in zip(projections, (1, 1, 2), _layouts(shard), strict=True):
            hf = f"{name}.{projection}.weight"
            rows += [(hf, sequential.format(of), layout), (hf, grouped.format(of), layout)]
    shared = f"{block}.shared_expert"
    rows += [
        (f"{shared}.gate_proj.weight", "mlp.shared_experts.linear_fc1.weight", gate),
        (f"{shared}.up_proj.weight", "mlp.shared_experts.linear_fc1.weight", up),
        (f"{shared}.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", columns),
        (f"{shared}_gate.weight", "mlp.shared_experts.gate_weight", whole),
    ]
    return rows


def _layouts(shard: Shard) -> tuple[Layout, Layout, Layout]:
    """Of an expert's gate, up and down projection."""
    if shard.expert_size == 1:
        return gate, up, columns
    return _of_whole(gate), _of_whole(up), whole


def _of_whole(layout: Layout) -> Layout:
    """The layout in a parameter that is not split, whatever the other layers are."""

    def of_whole(t: torch.Tensor, shape: ModelShape, shard: Shard) -> tuple[int, int, int, torch.Tensor]:
        return layout(t, shape, Shard())

    return of_whole
