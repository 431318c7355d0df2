"""How a Hugging Face tensor lies inside a Megatron parameter: whole, split by rows or columns, or interleaved
with others. Each gives a view of the local shard; weights/mapping.py and weights/experts.py name the tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from laminar_hpc.weights.hf import ModelShape


@dataclass(frozen=True)
class Shard:
    """Which of the tensor-parallel shards a Megatron parameter is, and of which expert-parallel rank."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1


# how a Hugging Face tensor lies in a Megatron parameter -> dim, start, length in all, view
Layout = Callable[[torch.Tensor, ModelShape, Shard], tuple[int, int, int, torch.Tensor]]


def whole(t: torch.Tensor, shape: ModelShape, shard: Shard) -> tuple[int, int, int, torch.Tensor]:
    """Replicated over the shards."""
    return 0, 0, t.shape[0], t


def rows(t: torch.Tensor, shape: ModelShape, shard: Shard) -> tuple[int, int, int, torch.Tensor]:
    """The output dimension is split, and no other tensor lies between."""
    return 0, shard.rank * t.shape[0], shard.size * t.shape[0], t


def columns(t: torch.Tensor, shape: ModelShape, shard: Shard) -> tuple[int, int, int, torch.Tensor]:
    """RowParallelLinear: the input dimension is split."""
    return 1, shard.rank * t.shape[1], shard.size * t.shape[1], t


def vocabulary(t: torch.Tensor, shape: ModelShape, shard: Shard) -> tuple[int, int, int, torch.Tensor]:
    """Rows of the padded vocabulary; the padding, at the end of the last shards, has no counterpart."""
    start = min(shard.rank * t.shape[0], shape.vocab)
    return 0, start, shape.vocab, t[: shape.vocab - start]


def _qkv(first: int | None) -> Layout:
    """linear_qkv interleaves, per key-value group, its query heads, its key head, its value head; a shard
    holds whole groups."""

    def layout(t: torch.Tensor, shape: ModelShape, shard: Shard) -> tuple[int, int, int, torch.Tensor]:
        queries = shape.heads // shape.kv_heads
        groups = t.view(-1, queries + 2, shape.head_dim, *t.shape[1:])
        view = groups[:, :queries] if first is None else groups[:, queries + first : queries + first + 1]
        rows = view.shape[0] * view.shape[1] * shape.head_dim
        return 0, shard.rank * rows, shard.size * rows, view

    return layout


def _half(which: int, fused: bool = False) -> Layout:
    """linear_fc1 holds, per shard, its rows of the gate, then its rows of the up projection. `fused`: both
    are one Hugging Face tensor, of which a shard has two slices."""

    def layout(t: torch.Tensor, shape: ModelShape, shard: Shard) -> tuple[int, int, int, torch.Tensor]:
        view = t.chunk(2)[which]
        rows = shard.size * view.shape[0]
        start = shard.rank * view.shape[0]
        return (0, which * rows + start, 2 * rows, view) if fused else (0, start, rows, view)

    return layout


query, key, value, gate, up = _qkv(None), _qkv(0), _qkv(1), _half(0), _half(1)
gate_of_both, up_of_both = _half(0, fused=True), _half(1, fused=True)
