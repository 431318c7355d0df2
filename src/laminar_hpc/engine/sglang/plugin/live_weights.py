"""The engine's live parameters under their Hugging Face names, where each lies in its whole, and what it adds
to the whole's check sums.

SGLang fuses q/k/v and gate/up projections, and experts, pads the vocabulary and splits over its
tensor-parallel ranks; this undoes all of it by views, so that the sums of the live weights compare with those
of the canonical tensors (docs/staleness.md). Every rank tells of its own shard.
"""

from collections.abc import Iterable, Iterator

import torch

from laminar_hpc.config.families import family_of
from laminar_hpc.engine.sglang.plugin.live_experts import expert_views, holds_experts
from laminar_hpc.engine.sglang.plugin.protocol import TensorShard
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import add_sums, slice_sums


def canonical_views(
    model: torch.nn.Module, config: object, rank: int = 0, size: int = 1, expert_parallel: int = 1
) -> Iterator[LocalSlice]:
    """What tensor-parallel rank `rank` of `size` holds. `config` is the model's Hugging Face config;
    `expert_parallel`: ranks over which whole experts are divided. A tied head is left out."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    family = family_of({"model_type": getattr(config, "model_type", None)})
    # few KV heads are held more than once
    kv_rank, kv_size = (rank, size) if kv_heads >= size else (rank * kv_heads // size, kv_heads)
    qkv = {
        "q": (heads * head_dim, rank, size),
        "k": (kv_heads * head_dim, kv_rank, kv_size),
        "v": (kv_heads * head_dim, kv_rank, kv_size),
    }
    for full_name, parameter in model.named_parameters():  # lists a tied head once, as the embedding
        name = full_name.replace(".base_layer.", ".")  # where SGLang has wrapped a layer for adapters
        tensor = parameter.detach()
        shape = tuple(tensor.shape)
        if ".qkv_proj." in name:
            pieces = tensor.split([rows // shards for rows, _, shards in qkv.values()])
            for (part, (rows, shard, _)), piece in zip(qkv.items(), pieces, strict=True):
                whole = (rows, *shape[1:])
                yield _slice(name.replace("qkv_proj", f"{part}_proj"), piece, whole, 0, shard * len(piece))
        elif holds_experts(name):
            yield from expert_views(name, tensor, rank, size, expert_parallel)
        elif ".gate_up_proj." in name:
            yield from _gate_and_up(name, tensor, rank, size, family.fused_mlp)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            module = model.get_submodule(name.rpartition(".")[0])
            split = not isinstance(module, torch.nn.Embedding)  # Gemma-3's is whole on every rank
            start = min(split * rank * len(tensor), config.vocab_size)
            whole = (config.vocab_size, *shape[1:])
            yield _slice(name, tensor[: config.vocab_size - start], whole, 0, start)
        elif name.endswith((".o_proj.weight", ".down_proj.weight")):
            yield _slice(name, tensor, (shape[0], size * shape[1]), 1, rank * shape[1])
        else:
            yield _slice(name, tensor, shape, 0, 0)


def _gate_and_up(name: str, tensor: torch.Tensor, rank: int, size: int, fused: bool) -> Iterator[LocalSlice]:
    """This rank's rows of the gate, then of the up projection; `fused`: in Hugging Face's file one tensor."""
    for number, (part, piece) in enumerate(zip(("gate", "up"), tensor.chunk(2), strict=True)):
        rows, start = size * len(piece), rank * len(piece)
        if fused:
            yield _slice(name, piece, (2 * rows, *piece.shape[1:]), 0, number * rows + start)
        else:
            own = name.replace("gate_up_proj", f"{part}_proj")
            yield _slice(own, piece, (rows, *piece.shape[1:]), 0, start)


def _slice(name: str, view: torch.Tensor, shape: tuple[int, ...], dim: int, start: int) -> LocalSlice:
    """`view` is what this rank holds along `dim` of the Hugging Face tensor of `shape`, from `start` on."""
    return LocalSlice(name, shape, dim, start, view.shape[dim], view)


def live_layout(views: Iterator[LocalSlice]) -> list[TensorShard]:
    """Name, full shape, dtype and slice of each view, in the order of `views`."""
    return [
        TensorShard(v.name, list(v.shape), str(v.view.dtype).removeprefix("torch."), v.dim, v.start, v.length)
        for v in views
    ]


def live_sums(views: Iterator[LocalSlice]) -> dict[str, tuple[int, int]]:
    """What this rank's parameters, as they are in memory now, add to the sums of the whole tensors."""
    return summed((v.name, slice_sums(v.view, v.shape, v.dim, v.start)) for v in views)


def summed(parts: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """By tensor, of which a rank may hold several slices, what all of them add to its sums."""
    of_tensors: dict[str, list[tuple[int, int]]] = {}
    for name, both in parts:
        of_tensors.setdefault(name, []).append(both)
    return {name: add_sums(each) for name, each in of_tensors.items()}
