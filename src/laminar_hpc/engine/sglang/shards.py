"""One engine's weights from what its tensor-parallel ranks tell of their shards: whole tensors, and the sums
of whole tensors.

Used by server.py. A shard may be held by several ranks (norms by all, few key-value heads by some):
the copies must be equal, and count once. A rank may hold several shards of a tensor.
"""

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.interface import Sums, TensorLayout
from laminar_hpc.engine.sglang.plugin.protocol import TensorShard


def whole_tensors(ranks: list[list[TensorShard]]) -> list[TensorLayout]:
    """The tensors that the ranks hold between them. Raises LaminarError for one that is not covered, or of
    which they disagree."""
    shards: dict[str, list[TensorShard]] = {}
    named = [{shard.name for shard in rank} for rank in ranks]
    for rank in ranks:
        for shard in rank:
            shards.setdefault(shard.name, []).append(shard)
    for name, held in shards.items():
        kinds = {(tuple(s.shape), s.dtype, s.dim) for s in held}
        if len(kinds) != 1 or any(name not in names for names in named):
            raise LaminarError(
                f"tensor {name}: the engine's tensor-parallel "
                "ranks do not agree on its shape, dtype and split"
            )
        covered = 0
        for start, length in sorted({(s.start, s.length) for s in held}):
            if start != covered:
                break
            covered += length
        if covered != held[0].shape[held[0].dim]:
            raise LaminarError(
                f"tensor {name}: the engine's tensor-parallel "
                "ranks hold it only in part, or parts of it twice"
            )
    return [TensorLayout(s.name, s.shape, s.dtype) for s in _first_of_each(ranks[0])]


def _first_of_each(layout: list[TensorShard]) -> list[TensorShard]:
    """Of the shards of a tensor that one rank holds, the first: a rank's sums are those of all of them."""
    return list({shard.name: shard for shard in reversed(layout)}.values())[::-1]


def whole_sums(layouts: list[list[TensorShard]], sums: list[Sums]) -> Sums:
    """Sums of the whole tensors from the ranks' shards. Raises LaminarError where copies of one differ."""
    by_start: dict[str, dict[int, tuple[int, int]]] = {}  # name -> first row or column -> sums of the rank's
    for layout, rank in zip(layouts, sums, strict=True):
        for shard in _first_of_each(layout):
            if not shard.length:
                continue
            known = by_start.setdefault(shard.name, {}).setdefault(shard.start, rank[shard.name])
            if known != rank[shard.name]:
                raise LaminarError(
                    f"tensor {shard.name}: the engine's tensor-parallel ranks hold copies that differ"
                )
    return {
        name: (sum(p[0] for p in held.values()) % 2**64, sum(p[1] for p in held.values()) % 2**64)
        for name, held in by_start.items()
    }
