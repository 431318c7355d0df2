"""One engine's KV pool as the extension sees it, and the plan of one request's copy from or into it."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import CHUNK_HEAD_BYTES, DTYPES, Shape
from laminar_hpc.engine.kv.native import extension

HUGE_PAGE = 1 << 21  # bytes, on x86-64 and on arm64 with pages of 4 KiB
HEADER_GAP = 1 << 16  # bytes between two tensors that the allocator laid side by side
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # linux/mman.h
NATIVE_PLAN = tuple[np.ndarray, np.ndarray, tuple[int, int, int, int, int, int, bool]]


@dataclass(frozen=True)
class Pool:
    """K and V of each layer: tensors [slots, heads, head_dim] of one shape, dtype, stride and device, kept
    alive by it."""

    tensors: tuple[torch.Tensor, ...]  # K and V of layer 0, K and V of layer 1, ...
    shape: Shape

    @classmethod
    def of(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], page_size: int) -> "Pool":
        """Raises KvRefused for a pool that is not of the MHA or GQA kind in fp32, bf16 or fp16 with pages of
        1 to 64 slots."""
        if not keys or len(keys) != len(values):
            raise KvRefused(
                f"KV pool refused: {len(keys)} key and {len(values)} "
                "value tensors; MHA and GQA pools have one each per layer"
            )
        tensors = tuple(tensor for pair in zip(keys, values, strict=True) for tensor in pair)
        first = tensors[0]
        names = {dtype: name for name, dtype in DTYPES.items()}
        if first.dim() != 3 or first.dtype not in names or first.device.type not in ("cpu", "cuda"):
            kind = f"{list(first.shape)} in {first.dtype} on {first.device}"
            raise KvRefused(
                f"KV pool refused: {kind}; it must be [slots, heads, "
                "head_dim] in fp32, bf16 or fp16 on the CPU or CUDA"
            )
        if any(
            (t.shape, t.dtype, t.stride(), t.device)
            != (first.shape, first.dtype, first.stride(), first.device)
            for t in tensors
        ):
            raise KvRefused(
                "KV pool refused: its key and value tensors differ in shape, dtype, stride or device"
            )
        if not 1 <= page_size <= 64:
            raise KvRefused(f"KV pool refused: page size {page_size}; 1 to 64 are supported")
        slots, heads, dim = first.shape
        if not slots or first.stride()[1:] != (dim, 1) or first.stride(0) < heads * dim:
            raise KvRefused(
                f"KV pool refused: strides {first.stride()} of "
                f"{list(first.shape)}; a slot's heads must lie together"
            )
        return cls(tensors, Shape(names[first.dtype], len(keys), heads, dim, page_size))

    @functools.cached_property
    def addresses(self) -> torch.Tensor:
        """Where each tensor begins, int64 [2 * layers] on their device."""
        found = torch.tensor([tensor.data_ptr() for tensor in self.tensors], dtype=torch.int64)
        return found.to(self.tensors[0].device)

    def plan(
        self,
        slots: torch.Tensor,
        chunk_bytes: int,
        threads: int,
        *,
        distinct: bool,
        isa: int = 0,
        streaming: bool = True,
    ) -> NATIVE_PLAN:
        """The first arguments of the extension's calls, for a pool in host memory.

        `slots` is int64 [tokens] in token order; `distinct` for what is written.
        """
        if slots.dtype != torch.int64 or slots.dim() != 1 or not len(slots) or slots.device.type != "cpu":
            raise KvRefused(
                f"slots refused: {list(slots.shape)} in {slots.dtype} "
                f"on {slots.device}; int64 [tokens] on the CPU is needed"
            )
        first, places = self.tensors[0], slots.contiguous().numpy()
        if first.device.type != "cpu":
            raise KvRefused(
                f"KV pool refused: it is on {first.device}; engine/kv/device.py brings its rows to the host"
            )
        bad = extension().misfit(places, len(first), self.shape.page_size, distinct)
        if bad >= 0:
            raise KvRefused(
                f"slots refused: number {bad} is slot {places[bad]}, outside the pool of {len(first)}, "
                f"named twice, or not where a page of {self.shape.page_size} slots has it"
            )
        planes = np.array([tensor.data_ptr() for tensor in self.tensors], dtype=np.uint64)
        stride, rows = first.stride(0) * first.element_size(), self.shape.rows_per_chunk(chunk_bytes)
        return planes, places, (len(first), stride, self.shape.row_bytes, rows, threads, isa, streaming)


def use_huge_pages(pool: Pool) -> None:
    """Puts a pool in host memory on huge pages, as far as Linux has them and allows it (MADV_COLLAPSE is of
    6.1): rows lie in random slots, and with small pages nearly each costs a walk through the page table. What
    is refused stays as it was."""
    if pool.tensors[0].device.type != "cpu":
        return
    spans: list[list[int]] = []
    for start, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in pool.tensors):
        if spans and start - spans[-1][1] <= HEADER_GAP:
            spans[-1][1] = start + size
        else:
            spans.append([start, start + size])
    libc = ctypes.CDLL(None)
    for start, end in spans:
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE) if first < last else ():
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def gather(pool: Pool, slots: torch.Tensor, chunk_bytes: int, threads: int, **options: Any) -> torch.Tensor:
    """All chunk records of a request, as uint8 [bytes]; engine/kv/frames.py has their layout."""
    plan = pool.plan(slots, chunk_bytes, threads, distinct=False, **options)
    records = aligned(pool.shape.record_bytes(chunk_bytes) * pool.shape.chunks(len(slots), chunk_bytes))
    extension().pack(*plan, records.numpy())
    return records


def scatter(
    pool: Pool,
    slots: torch.Tensor,
    records: torch.Tensor,
    chunk_bytes: int,
    threads: int,
    **options: Any,
) -> None:
    """Writes a request's records into reserved slots. Raises KvRefused, with the slots in part written, where
    a chunk fails its check."""
    plan = pool.plan(slots, chunk_bytes, threads, distinct=True, **options)
    needed = pool.shape.record_bytes(chunk_bytes) * pool.shape.chunks(len(slots), chunk_bytes)
    if (
        records.dtype != torch.uint8
        or records.dim() != 1
        or not records.is_contiguous()
        or len(records) < needed
    ):
        raise KvRefused(
            f"KV chunks refused: {len(records)} bytes of {records.dtype} where {needed} bytes are needed"
        )
    bad = extension().unpack(*plan, records.numpy())
    if bad >= 0:
        raise KvRefused(f"KV chunk {bad} refused: it is not the one expected, or its checksum differs")


def aligned(size: int) -> torch.Tensor:
    """uint8 [size], not initialised, at a whole cache line (streaming stores want that), on huge pages where
    numpy gets them."""
    buffer = torch.from_numpy(np.empty(size + CHUNK_HEAD_BYTES, dtype=np.uint8))
    start = -buffer.data_ptr() % CHUNK_HEAD_BYTES
    return buffer[start : start + size]
