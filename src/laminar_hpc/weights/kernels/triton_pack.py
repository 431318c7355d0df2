"""Triton: a Megatron shard into canonical slices in the bucket, cast, with the two checksums taken in the
same pass.

Bytes move once: each program takes TILES tiles of BR rows and BC columns. Two 16-bit items are handled as the
one 32-bit word that they share wherever every row begins on a word; else each item adds its half of the word,
as weights/kernels/sums.py does.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from laminar_hpc.weights.kernels.grid import common_grid
from laminar_hpc.weights.kernels.slices import LocalSlice

TILE = 1024  # words: 8 per thread of 128, so that the sums of a thread stay in registers
TILES = 16  # per program: one pair of atomic additions per 64 KB written
PROGRAMS = 512  # at least, before any takes more than a tile: small slices spread over the device
_COPY, _BFLOAT16, _FLOAT16 = 0, 1, 2
_INTEGER = {2: tl.int16, 4: tl.int32}


@triton.jit
def _cast(bits, CAST: tl.constexpr):
    """The image in 16 bits (uint32) of float32 images (uint32), to nearest even. Integer arithmetic: Triton's
    interpreter truncates."""
    if CAST == 1:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def pack_kernel(
    source,
    target,
    sums,
    rows,
    columns,
    source_stride,
    target_stride,
    first,
    canonical_stride,
    CAST: tl.constexpr,
    PAIRS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    TILES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """source int32 or int16 items; target int32 words (PAIRS: of two items each) or items; sums int64 [2],
    added to.

    Columns, target_stride, first and canonical_stride count what the target counts; source_stride counts
    items. `first` is the canonical index of the first one. WIDE: 64-bit offsets.
    """
    across = tl.cdiv(columns, BC)
    sum_words = tl.zeros([BR, BC], tl.uint64)
    sum_indexed = tl.zeros([BR, BC], tl.uint64)
    for number in range(TILES):
        tile = tl.program_id(0) * TILES + number
        row = (tile // across) * BR + tl.arange(0, BR)[:, None]
        if WIDE:
            row = row.to(tl.int64)
        start = (tile % across) * BC
        column = start + tl.arange(0, BC)[None, :]
        inside = (row < rows) & (column < columns)
        index = (first + row * canonical_stride + column).to(tl.uint64 if WIDE else tl.uint32)
        if PAIRS:
            item = 2 * start + tl.arange(0, 2 * BC)[None, :]
            image = tl.load(
                source + (row * source_stride + item), mask=(row < rows) & (item < 2 * columns), other=0
            )
            low, high = tl.split(tl.reshape(_cast(image.to(tl.uint32, bitcast=True), CAST), [BR, BC, 2]))
            word = low | (high << 16)
            stored = word
        else:
            image = tl.load(source + (row * source_stride + column), mask=inside, other=0)
            if CAST == 0:
                stored = image
            else:
                stored = _cast(image.to(tl.uint32, bitcast=True), CAST)
            if target.dtype.element_ty == tl.int32:
                word = stored.to(tl.uint32, bitcast=True)
            else:
                word = (stored.to(tl.uint32) & 0xFFFF) << (16 * (index & 1)).to(tl.uint32)
                index = index >> 1
        tl.store(target + (row * target_stride + column), stored.to(target.dtype.element_ty), mask=inside)
        sum_words += word.to(tl.uint64)
        sum_indexed += (index + 1).to(tl.uint64) * word.to(tl.uint64)  # mul.wide.u32 unless WIDE
    tl.atomic_add(sums, tl.sum(tl.reshape(sum_words, [BR * BC])).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(
        sums + 1, tl.sum(tl.reshape(sum_indexed, [BR * BC])).to(tl.int64, bitcast=True), sem="relaxed"
    )


def pack(slices: Sequence[LocalSlice], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each slice into its target of shape `slice_shape`; returns their sums, int64 [slices, 2] on the device,
    modulo 2**64."""
    sums = torch.zeros((len(slices), 2), dtype=torch.int64, device=targets[0].device)
    for local, target, both in zip(slices, targets, sums, strict=True):
        if target.numel():
            _launch(local, target, both)
    return sums


def _launch(local: LocalSlice, target: torch.Tensor, sums: torch.Tensor) -> None:
    source = local.view
    call = plan(
        *(source.shape, source.stride(), source.dtype, source.data_ptr() % 4 == 0),
        *(target.shape, target.stride(), target.dtype, target.data_ptr() % 4 == 0),
        *(local.shape, local.dim, local.start, local.length),
    )
    items = triton.reinterpret(source, call.source), triton.reinterpret(target, call.target)
    pack_kernel[(call.programs,)](*items, sums, *call.sizes, **call.constants)


class KernelLaunch(NamedTuple):
    """A launch of the kernel, but for its pointers."""

    programs: int
    source: tl.dtype
    target: tl.dtype
    sizes: tuple[int, ...]
    constants: dict[str, Any]


@functools.lru_cache(1 << 14)  # a publication's slices are those of the last one
def plan(
    source_shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    source_dtype: torch.dtype,
    source_on_word: bool,
    target_shape: tuple[int, ...],
    target_strides: tuple[int, ...],
    target_dtype: torch.dtype,
    target_on_word: bool,
    shape: tuple[int, ...],
    dim: int,
    start: int,
    length: int,
) -> KernelLaunch:
    """`on_word`: whether the memory begins on a 32-bit word. The last four are a Slice's."""
    whole = _contiguous_strides(shape)
    slice_shape = (*shape[:dim], length, *shape[dim + 1 :])
    grid = common_grid([(source_shape, source_strides), (target_shape, target_strides), (slice_shape, whole)])
    first, cast = start * whole[dim], _COPY
    if source_dtype != target_dtype:
        cast = _BFLOAT16 if target_dtype == torch.bfloat16 else _FLOAT16
    # Whether every row of 16-bit items begins and ends between two words, in memory and in the whole tensor;
    # of a copy the source is read by words too.
    counted = [grid.columns, first, *grid.strides[0 if cast == _COPY else 1 :]]
    on_words = target_on_word and (source_on_word or cast != _COPY) and all(n % 2 == 0 for n in counted)
    pairs = target_dtype.itemsize == 2 and on_words
    half = 2 if pairs else 1
    columns, own_stride = grid.columns // half, grid.strides[0] // (half if not cast else 1)
    BC = min(triton.next_power_of_2(columns), TILE if grid.rows == 1 else TILE // 2)
    BR = 1 if grid.rows == 1 else min(TILE // BC, triton.next_power_of_2(grid.rows))
    tiles = triton.cdiv(grid.rows, BR) * triton.cdiv(columns, BC)
    per_program = min(TILES, 1 << (max(1, tiles // PROGRAMS).bit_length() - 1))
    farthest = max((grid.rows + BR) * max(grid.strides), _numel(shape)) + 2 * TILE
    strides = grid.strides[1] // half, first // half, grid.strides[2] // half
    return KernelLaunch(
        triton.cdiv(tiles, per_program),
        _INTEGER[4 if pairs and not cast else source_dtype.itemsize],
        _INTEGER[4 if pairs else target_dtype.itemsize],
        (grid.rows, columns, own_stride, *strides),
        {
            "CAST": cast,
            "PAIRS": pairs and cast != _COPY,
            "BR": BR,
            "BC": BC,
            "TILES": per_program,
            "WIDE": farthest >= 2**31,
        },
    )


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(_numel(shape[dim + 1 :]) for dim in range(len(shape)))
