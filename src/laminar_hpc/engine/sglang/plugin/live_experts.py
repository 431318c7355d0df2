"""The experts in an engine's live parameters under their Hugging Face names; live_weights.py has all others.

SGLang has the gate and up projections of all experts that a rank holds in one parameter (w13_weight), and the
down projections in another (w2_weight). Of `size` tensor-parallel ranks size / expert_parallel split each
expert among them, and so many ranks in a row hold the same experts (parallel_state.py:2881).
"""

from collections.abc import Iterator

import torch

from laminar_hpc.weights.kernels.slices import LocalSlice

_PARAMETERS = (".experts.w13_weight", ".experts.w2_weight")
_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ("w1", "w3", "w2")


def holds_experts(name: str) -> bool:
    """Whether the parameter of this name in SGLang's model is of experts."""
    return name.endswith(_PARAMETERS)


def expert_views(
    name: str, tensor: torch.Tensor, rank: int, size: int, expert_parallel: int
) -> Iterator[LocalSlice]:
    """`tensor` [local experts, 2 x width, hidden] or [local experts, hidden, width]. An expert that other
    ranks hold has an empty slice: all ranks name all tensors."""
    base, which = name.rsplit(".", 1)
    gate, up, down = _MIXTRAL_NAMES if ".block_sparse_moe." in name else _NAMES
    shards = size // expert_parallel
    first, shard = rank // shards * len(tensor), rank % shards
    for expert in range(len(tensor) * expert_parallel):
        here = first <= expert < first + len(tensor)
        held = tensor[expert - first if here else 0]
        if which == "w2_weight":
            parts = {down: (held, 1)}
        else:
            parts = dict(zip((gate, up), ((half, 0) for half in held.chunk(2)), strict=True))
        for part, (view, dim) in parts.items():
            length = view.shape[dim]
            whole = tuple(shards * n if at == dim else n for at, n in enumerate(view.shape))
            begin, stop = (shard * length, length) if here else (0, 0)
            view = view.narrow(dim, 0, stop)
            yield LocalSlice(f"{base}.{expert}.{part}.weight", whole, dim, begin, stop, view)
