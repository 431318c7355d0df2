"""The files of a Hugging Face directory that the trainer ranks write side by side: which rank writes which
tensors. Pure; called by trainer/checkpointing/hf_files.py on every rank with the same input.

A tensor lies whole in one file, so its slices come together at one rank; that is one of the tensor-parallel
group that holds them, and each replica of the model does a part of the tensors.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.trainer.canonical.plan import HeldSlice
from laminar_hpc.weights.experts import is_expert

FILE_BYTES = 64 << 20  # of the smallest file that is worth another rank's work


class HfFile(NamedTuple):
    """`writer`: the trainer rank that writes it; `tensors` in the order of a Hugging Face state dict."""

    name: str
    writer: int
    tensors: list[str]


def plan_files(
    slices: dict[str, list[HeldSlice]],
    item_bytes: int,
    stage_ranks: int,
    tensor_parallel: int,
    expert_parallel: int = 1,
) -> list[HfFile]:
    """`slices` as canonical/plan.py `plan` has them. `stage_ranks`: trainer ranks of a pipeline stage, which
    follow on each other, and so do the `tensor_parallel` of them that share a layer. With expert parallelism
    one rank in `expert_parallel` holds an expert, whole, and writes it."""
    of_holders: dict[tuple[int, int | None], list[str]] = {}
    for name, held in slices.items():
        stage, rank = divmod(held[0].rank, stage_ranks)
        alone = expert_parallel > 1 and is_expert(name)
        of_holders.setdefault((stage, rank % expert_parallel if alone else None), []).append(name)
    # one rank of each tensor-parallel group before a second one of any: they are on different machines
    order = sorted(range(stage_ranks), key=lambda rank: (rank % tensor_parallel, rank))
    of_writer: dict[int, list[str]] = {}
    for (stage, holder), names in of_holders.items():
        ranks = order if holder is None else range(holder, stage_ranks, expert_parallel)
        sizes = {name: item_bytes * math.prod(slices[name][0].shape) for name in names}
        files = min(len(ranks), max(1, sum(sizes.values()) // FILE_BYTES))
        for rank, share in zip(ranks, _shares(names, sizes, files), strict=False):
            of_writer.setdefault(stage * stage_ranks + rank, []).extend(share)
    writers = sorted(of_writer, key=lambda rank: (rank // stage_ranks, order.index(rank % stage_ranks)))
    planned = [(writer, of_writer[writer]) for writer in writers]
    if len(planned) == 1:
        return [HfFile(WEIGHTS_FILE, *planned[0])]
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    return [
        HfFile(f"{stem}-{number:05d}-of-{len(planned):05d}.safetensors", *each)
        for number, each in enumerate(planned, 1)
    ]


def _shares(names: Sequence[str], sizes: dict[str, int], count: int) -> list[list[str]]:
    """At most `count` shares of about equal size, each in the order of `names`."""
    shares: list[list[str]] = [[] for _ in range(count)]
    least = [(0, number) for number in range(count)]
    for name in sorted(names, key=lambda name: -sizes[name]):
        size, number = heapq.heappop(least)
        shares[number].append(name)
        heapq.heappush(least, (size + sizes[name], number))
    place = {name: at for at, name in enumerate(names)}
    return [sorted(share, key=place.__getitem__) for share in shares if share]
