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

FILE_BYTES = 64 << 20  # of the smallest file that is worth another rank's work


class HfFile(NamedTuple):
    """`writer`: the trainer rank that writes it; `tensors` in the order of a Hugging Face state dict."""

    name: str
    writer: int
    tensors: list[str]


def plan_files(
    slices: dict[str, list[HeldSlice]], item_bytes: int, stage_ranks: int, tensor_parallel: int
) -> list[HfFile]:
    """`slices` as canonical/plan.py `plan` has them. `stage_ranks`: trainer ranks of a pipeline stage, which
    follow on each other, and so do the `tensor_parallel` of them that share a layer."""
    of_stage: dict[int, list[str]] = {}
    for name, held in slices.items():
        of_stage.setdefault(held[0].rank // stage_ranks, []).append(name)
    # one rank of each tensor-parallel group before a second one of any: they are on different machines
    order = sorted(range(stage_ranks), key=lambda rank: (rank % tensor_parallel, rank))
    planned: list[tuple[int, list[str]]] = []
    for stage, names in sorted(of_stage.items()):
        sizes = {name: item_bytes * math.prod(slices[name][0].shape) for name in names}
        files = min(stage_ranks, max(1, sum(sizes.values()) // FILE_BYTES))
        shares = _shares(names, sizes, files)
        planned += [(stage * stage_ranks + rank, share) for rank, share in zip(order, shares, strict=False)]
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
