"""Functions that hooks.py puts in place of SGLang's, or around them, for engines on the CPU."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, silu


def fork_children(result: object, *_: object, **__: object) -> None:
    """Hook after SGLang has chosen "spawn": the scheduler and the detokenizer are forked, and get the
    launcher's imports for nothing.

    At that time the launcher has one thread and has run no tensor operation; a process that uses CUDA could
    not be forked.
    """
    multiprocessing.set_start_method("fork", force=True)


def leave_shape(model_config: Any, *_: object) -> Any:
    """In place of what SGLang does for its own CPU kernels, which are not used here: it pads the feed-forward
    layers to multiples of 32 per rank and heads to multiples of the ranks, and takes Qwen2's heads for
    hidden_size / heads wide. The weights would not fit."""
    return model_config


def plain_memory(dims: tuple[int, ...], dtype: torch.dtype, *_: object, **__: object) -> torch.Tensor:
    """In place of memory that CUDA knows: there is no device to copy it from."""
    return torch.empty(dims, dtype=dtype)


def rotate(
    original: Callable,
    rope: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hook around RotaryEmbedding.forward_native. positions: [tokens]; query, key: [tokens, heads *
    head_size].

    Whole heads in the NeoX order are x * [cos, cos] + swapped(x) * [-sin, sin], with the two factors made
    once per embedding; in float32 and rounded once, as SGLang's kernels for CUDA do.
    """
    special = any(rest) or any(value is not None for value in options.values())
    if special or not rope.is_neox_style or rope.rotary_dim != rope.head_size:
        return original(rope, positions, query, key, *rest, **options)
    factors = rotation(rope, positions)
    return rotated(query, factors), rotated(key, factors)


def add_gated(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, sums: torch.Tensor
) -> None:
    """In place of SGLang's triton kernel: adds the shared expert's output, weighted by the sigmoid of its
    gate, to that of the routed experts. hidden_states, shared, sums: [tokens, hidden]; gate_weight: [hidden].
    """
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    sums.addcmul_(shared, gate[:, None].to(sums.dtype))


def experts_here(
    original: Callable, layer: Any, x: torch.Tensor, topk_output: Any, *rest: Any
) -> torch.Tensor:
    """Hook around moe_forward_native, for ranks that divide whole experts: those of other ranks have number
    -1, with which SGLang's loop cannot count. x: [tokens, hidden]; returns this rank's part of the sum."""
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if not (ids < 0).any():
        return original(layer, x, topk_output, *rest)
    sums = torch.zeros_like(x)
    for expert, (w13, w2) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[rows], w13).chunk(2, dim=-1)
        of_expert = linear(silu(gate) * up, w2) * weights[rows, choices, None].to(x.dtype)
        sums.index_add_(0, rows, of_expert)
    return sums


def assign_slots(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    count: int,
) -> None:
    """In place of a Triton kernel (allocation.py:688): request i's new KV slots into columns [starts[i],
    ends[i]) of its row. requests, starts, ends: [count]; slots: [sum of ends - starts]; table: [rows,
    longest context]."""
    lengths = (ends - starts).long()
    rows = requests.long().repeat_interleave(lengths)
    table[rows, columns(starts, lengths)] = slots.to(table.dtype)


def columns(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [sum of lengths]: starts[i], starts[i] + 1, ... for each i."""
    before = torch.cumsum(lengths, 0) - lengths
    return torch.arange(int(lengths.sum())) + (starts.long() - before).repeat_interleave(lengths)


def rotation(rope: Any, positions: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, 1, 2 * head_size]: the two factors of each position."""
    # made at first, and when SGLang lengthens its cache
    if len(getattr(rope, "laminar_factors", ())) != len(rope.cos_sin_cache):
        cos, sin = rope.cos_sin_cache.float().chunk(2, dim=-1)
        rope.laminar_factors = torch.cat((cos, cos, -sin, sin), dim=-1)
    return rope.laminar_factors.index_select(0, positions.flatten())[:, None]


def rotated(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads * head_size], any mixture of query and key heads."""
    cos, sin = factors.chunk(2, dim=-1)
    heads = x.view(len(x), -1, cos.shape[-1]).float()
    turned = heads.roll(cos.shape[-1] // 2, -1)
    return (heads * cos + turned * sin).to(x.dtype).view(x.shape)  # each rounded alone, as in the trainer
