"""Context parallelism: the tokens of a pack are split over the context-parallel ranks in contiguous shares of
equal size, wherever its sequences begin and end.

All but attention works token by token on a rank's own share. Around attention an all-to-all gives each rank
all tokens of its share of the heads, and back (DeepSpeed Ulysses, arXiv 2309.14509, section 3.1). So
attention sees whole sequences, exactly as one rank does, and all ranks have the same work. Key-value heads
that are fewer than the ranks are copied. Behind the output layer the log-probs of all shares are put
together: each rank has the pack's whole loss, and the gradient of its own share of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from numpy.typing import NDArray


def context_ranks() -> int:
    """The number of ranks that share a pack."""
    if not parallel_state.model_parallel_is_initialized():
        return 1
    return parallel_state.get_context_parallel_world_size()


@dataclass(frozen=True)
class ContextShare:
    """What a context-parallel rank has of a pack: `tokens`, where they are in the pack; `wanted` int64
    [own]: which of the pack's `total` targets follow on them, in order."""

    tokens: slice
    wanted: NDArray[np.int64]
    total: int


def context_share(tokens: int, selected: NDArray[np.int64]) -> ContextShare:
    """This rank's share of a pack of so many tokens, a multiple of the ranks, whose places `selected`
    [total] have targets."""
    ranks = context_ranks()
    size, rank = tokens // ranks, parallel_state.get_context_parallel_rank() if ranks > 1 else 0
    return ContextShare(
        slice(rank * size, (rank + 1) * size), np.flatnonzero(selected // size == rank), len(selected)
    )


def heads_in_attention(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Query and key-value heads that each of `ranks` context-parallel ranks attends with, of those that its
    tensor-parallel rank has."""
    return heads // ranks, kv_heads // math.gcd(kv_heads, ranks)


def heads_of_all_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """query [tokens / ranks, heads, d], key and value [tokens / ranks, kv_heads, d], all heads of this rank's
    tokens -> [tokens, heads / ranks, d] and twice [tokens, own kv_heads, d]. `ranks` divides `heads`; each
    query head keeps its key-value head, of which several ranks may get a copy. One message to each rank."""
    ranks, width = group.size(), query.shape[2]
    copies = ranks * heads_in_attention(query.shape[1], key.shape[1], ranks)[1] // key.shape[1]
    if copies > 1:
        key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
    parts = [t.reshape(len(t), ranks, -1) for t in (query, key, value)]
    received = all_to_all_sp2hp(torch.cat(parts, dim=2).flatten(1), group)
    of_each = received.split([part.shape[2] for part in parts], dim=1)
    return tuple(t.unflatten(1, (-1, width)) for t in of_each)


def tokens_of_all_heads(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Attention's output [tokens, heads / ranks * d] -> [tokens / ranks, heads * d]."""
    return all_to_all_hp2sp(output, group)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, wanted: torch.Tensor, total: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.wanted = wanted
        ctx.own = own.shape[1]
        whole = own.new_zeros(len(own), total).index_copy_(1, wanted, own[:, : len(wanted)])
        dist.all_reduce(whole, group=group)  # the others add zeros
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        of_own = gradient.new_zeros(len(gradient), ctx.own)
        of_own[:, : len(ctx.wanted)] = gradient.index_select(1, ctx.wanted)
        return of_own, None, None, None


def joined(own: Sequence[torch.Tensor], wanted: torch.Tensor, total: int) -> tuple[torch.Tensor, ...]:
    """float32 [own] each -> [total] each, the same on all context-parallel ranks, which compute one loss from
    them: so the gradient of a rank's own is taken from its own loss, and not summed. `wanted` as in
    ContextShare; what a rank has beyond it is left out. Collective over the context-parallel ranks."""
    group = parallel_state.get_context_parallel_group()
    return tuple(_Joined.apply(torch.stack(tuple(own)), wanted, total, group))


def joined_rows(own: torch.Tensor, wanted: torch.Tensor, total: int) -> torch.Tensor:
    """[own, width] -> [total, width], the same on all context-parallel ranks, without gradient; `wanted` as
    in `joined`."""
    if context_ranks() == 1:
        return own
    whole = torch.zeros(total, own.shape[1], device=own.device)
    whole.index_copy_(0, wanted, own[: len(wanted)].float())
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())  # the others add zeros
    return whole.to(own.dtype)
