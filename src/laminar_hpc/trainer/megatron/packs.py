"""Sequences of tokens as one pack, which is what the model is run on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray

from laminar_hpc.store.payload.layout import Routes
from laminar_hpc.trainer.megatron.attention import PackLayout, pack_layout
from laminar_hpc.trainer.megatron.context import context_ranks, context_share
from laminar_hpc.trainer.megatron.distillation import TeacherRows
from laminar_hpc.trainer.megatron.routing import routes_of_rank

Ints = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class Pack:
    """Sequences one after the other. A sequence's last token predicts nothing, so it is no input.

    `tokens`, `positions` [tokens] int64; `selected` [trained] int64: the places whose next token is asked
    for; `targets` [trained]: it. With context parallelism these are of this rank's share of the pack, and at
    least one place is selected; `wanted` int64: which of the pack's `total` targets they are, see
    context.py's ContextShare. `layout` is of the whole pack. `teacher`: of the targets, where the divergence
    from one is asked for.
    """

    layout: PackLayout
    tokens: torch.Tensor
    positions: torch.Tensor
    selected: torch.Tensor
    targets: torch.Tensor
    wanted: torch.Tensor
    total: int
    teacher: TeacherRows | None = None

    @property
    def size(self) -> int:
        """Tokens of the whole pack."""
        return sum(self.layout.lengths)


class Packed(Protocol):
    """A micro-batch, for whoever runs it."""

    @property
    def pack(self) -> Pack: ...


def _tensor_parallel_ranks() -> int:
    if not parallel_state.model_parallel_is_initialized():
        return 1
    return parallel_state.get_tensor_model_parallel_world_size()


def make_pack(
    sequences: Sequence[Ints],
    selected: Sequence[Ints],
    device: torch.device,
    size: int = 0,
    routes: Sequence[Routes] | None = None,
) -> Pack:
    """`selected[i]`: the indices of those tokens of sequence i (each at least 1) whose log-probs are asked
    for. `routes[i]`: the experts of all its tokens but the last, in this rank's layers; None: the router
    chooses.

    Filled up to `size` tokens, and to a multiple of the tensor-parallel times the context-parallel ranks,
    over which the pack is split; with sequences of zeros, none longer than the others are, so that attention
    to them costs no more.
    """
    lengths = [len(s) - 1 for s in sequences]
    used, longest, ranks = sum(lengths), max(lengths), _tensor_parallel_ranks() * context_ranks()
    missing = -(-max(used, size) // ranks) * ranks - used
    lengths += [min(longest, missing - at) for at in range(0, missing, longest)]
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)

    texts = [np.asarray(s, np.int64) for s in sequences]
    chosen = [np.asarray(indices, np.int64) for indices in selected]
    tokens = np.concatenate([*(text[:-1] for text in texts), np.zeros(missing, np.int64)])
    positions = np.concatenate([np.arange(n) for n in lengths])
    places = np.concatenate([start - 1 + of for start, of in zip(starts, chosen, strict=False)])
    targets = np.concatenate([text[of] for text, of in zip(texts, chosen, strict=True)])
    own = context_share(len(tokens), places)
    alone = np.zeros(0 if len(own.wanted) else 1, np.int64)  # no rows at all would be a case of their own

    def moved(*parts: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)

    layout = pack_layout(lengths, device)
    if routes is not None:
        of_rank = torch.from_numpy(routes_of_rank(routes, own.tokens, _tensor_parallel_ranks()))
        layout = replace(layout, routes=of_rank.to(device, non_blocking=True))
    return Pack(
        layout=layout,
        tokens=moved(tokens[own.tokens]),
        positions=moved(positions[own.tokens]),
        selected=moved(places[own.wanted] - own.tokens.start, alone),
        targets=moved(targets[own.wanted], alone),
        wanted=moved(own.wanted),
        total=own.total,
    )
