"""The engine's live parameters under their Hugging Face names, where each lies in its whole, and what it adds
to the whole's check sums.

SGLang fuses q/k/v and gate/up projections, pads the vocabulary and splits over its tensor-parallel ranks;
this undoes all of it by views, so that the sums of the live weights compare with those of the canonical
tensors (docs/architecture.md#weights-and-staleness). Every rank tells of its own shard.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from laminar_hpc.engine.sglang.plugin.protocol import TensorShard
from laminar_hpc.kernels.sums import slice_sums


@dataclass(frozen=True)
class View:
    """Elements [start, start + tensor.shape[dim]) along `dim` of a Hugging Face tensor of `shape`, as they
    lie in the engine."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0


def canonical_views(model: torch.nn.Module, config: object, rank: int = 0, size: int = 1) -> Iterator[View]:
    """What tensor-parallel rank `rank` of `size` holds. `config` is the model's Hugging Face config. A tied
    head is left out."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    # few KV heads are held more than once
    kv_rank, kv_size = (rank, size) if kv_heads >= size else (rank * kv_heads // size, kv_heads)
    qkv = {
        "q": (heads * head_dim, rank, size),
        "k": (kv_heads * head_dim, kv_rank, kv_size),
        "v": (kv_heads * head_dim, kv_rank, kv_size),
    }
    for name, parameter in model.named_parameters():  # lists a tied head once, as the embedding
        tensor = parameter.detach()
        shape = tuple(tensor.shape)
        if ".qkv_proj." in name:
            pieces = tensor.split([rows // shards for rows, _, shards in qkv.values()])
            for (part, (rows, shard, _)), piece in zip(qkv.items(), pieces, strict=True):
                yield View(
                    name.replace("qkv_proj", f"{part}_proj"), piece, (rows, *shape[1:]), 0, shard * len(piece)
                )
        elif ".gate_up_proj." in name:
            for part, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                whole = (size * len(piece), *shape[1:])
                yield View(name.replace("gate_up_proj", f"{part}_proj"), piece, whole, 0, rank * len(piece))
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            start = min(rank * len(tensor), config.vocab_size)
            yield View(name, tensor[: config.vocab_size - start], (config.vocab_size, *shape[1:]), 0, start)
        elif name.endswith((".o_proj.weight", ".down_proj.weight")):
            yield View(name, tensor, (shape[0], size * shape[1]), 1, rank * shape[1])
        else:
            yield View(name, tensor, shape)


def live_layout(views: Iterator[View]) -> list[TensorShard]:
    """Name, full shape, dtype and slice of each view, in the order of `views`."""
    return [
        TensorShard(
            v.name,
            list(v.shape),
            str(v.tensor.dtype).removeprefix("torch."),
            v.dim,
            v.start,
            v.tensor.shape[v.dim],
        )
        for v in views
    ]


def live_sums(views: Iterator[View]) -> dict[str, tuple[int, int]]:
    """What this rank's parameters, as they are in memory now, add to the sums of the whole tensors."""
    return {v.name: slice_sums(v.tensor, v.shape, v.dim, v.start) for v in views}
