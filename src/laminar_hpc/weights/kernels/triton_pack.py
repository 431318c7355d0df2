"""Triton: a Megatron shard into canonical slices in the bucket, cast, with the two checksums taken in the
same pass.

Bytes move once: each program takes some tiles of BR rows and BC columns of one slice. All slices of a kind
are one launch, as launches one by one take the host longer than the slices take the GPU. Two 16-bit items are
handled as the one 32-bit word that they share wherever every row begins on a word; else each item adds its
half of the word, as weights/kernels/sums.py does.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from laminar_hpc.weights.kernels.grid import common_grid
from laminar_hpc.weights.kernels.slices import LocalSlice

TILE = 1024  # words: 8 per thread of 128, so that the sums of a thread stay in registers
TILES = 8  # per program, at most: one pair of atomic additions per 32 KB written
KEPT = 1 << 12  # lists of slices whose launches are kept
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
    slices,
    programs,
    sums,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    CAST: tl.constexpr,
    PAIRS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """slices int64 [slices, 8]: addresses of source and target, rows, columns, source_stride, target_stride,
    first, canonical_stride. programs int32 [programs, 3]: which slice, its first tile, and the one behind the
    last. sums int64 [slices, 2], added to.

    The source is of int32 or int16 items; the target of int32 words (PAIRS: of two items each) or items.
    Columns, target_stride, first and canonical_stride count what the target counts; source_stride counts
    items. `first` is the canonical index of the first one. WIDE: 64-bit offsets. ALIGNED: rows begin and end
    at multiples of 16 bytes, of any items.
    """
    program = programs + 3 * tl.program_id(0)
    number = tl.load(program).to(tl.int64)
    entry = slices + 8 * number
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    target = tl.load(entry + 1).to(tl.pointer_type(TARGET))
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows = tl.load(entry + 2).to(tl.int32)
    columns = tl.load(entry + 3).to(tl.int32)
    source_stride = tl.load(entry + 4).to(OFFSET)
    target_stride = tl.load(entry + 5).to(OFFSET)
    first = tl.load(entry + 6).to(OFFSET)
    canonical_stride = tl.load(entry + 7).to(OFFSET)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        columns = tl.multiple_of(columns, 8)
        source_stride = tl.multiple_of(source_stride, 8)
        target_stride = tl.multiple_of(target_stride, 8)
    across = tl.cdiv(columns, BC)
    sum_words = tl.zeros([BR, BC], tl.uint64)
    sum_indexed = tl.zeros([BR, BC], tl.uint64)
    for tile in range(tl.load(program + 1), tl.load(program + 2)):
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
            if tl.int32 == TARGET:
                word = stored.to(tl.uint32, bitcast=True)
            else:
                word = (stored.to(tl.uint32) & 0xFFFF) << (16 * (index & 1)).to(tl.uint32)
                index = index >> 1
        tl.store(target + (row * target_stride + column), stored.to(TARGET), mask=inside)
        sum_words += word.to(tl.uint64)
        sum_indexed += (index + 1).to(tl.uint64) * word.to(tl.uint64)  # mul.wide.u32 unless WIDE
    sums += 2 * number
    tl.atomic_add(sums, tl.sum(tl.reshape(sum_words, [BR * BC])).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(
        sums + 1, tl.sum(tl.reshape(sum_indexed, [BR * BC])).to(tl.int64, bitcast=True), sem="relaxed"
    )


class Kind(NamedTuple):
    """All slices of a kind; both tensors as the kernel takes them."""

    slices: torch.Tensor
    programs: torch.Tensor
    constants: dict[str, Any]


def pack(
    slices: Sequence[LocalSlice],
    targets: Sequence[torch.Tensor],
    check: Callable[[LocalSlice, torch.Tensor], None] = lambda local, target: None,
) -> torch.Tensor:
    """Each slice into its target of shape `slice_shape`; returns their sums, int64 [slices, 2] on the device,
    modulo 2**64. `check` may raise for a pair; it is not asked again about what is packed once more."""
    key = tuple(_key(local, target) for local, target in zip(slices, targets, strict=True))
    launches = _launches.get(key)
    if launches is None:
        for local, target in zip(slices, targets, strict=True):
            check(local, target)
        if len(_launches) >= KEPT:
            _launches.clear()
        launches = _launches[key] = _prepare(key, targets[0].device)
    sums = torch.zeros((len(slices), 2), dtype=torch.int64, device=targets[0].device)
    for launch in launches:
        pack_kernel[(len(launch.programs),)](launch.slices, launch.programs, sums, **launch.constants)
    return sums


_launches: dict[tuple, list[Kind]] = {}  # a publication's chunks are those of the last one


def _key(local: LocalSlice, target: torch.Tensor) -> tuple:
    """All that a launch depends on, and a check."""
    source = local.view
    return (
        *(source.data_ptr(), source.shape, source.stride(), source.dtype),
        *(target.data_ptr(), target.shape, target.stride(), target.dtype),
        *(local.shape, local.dim, local.start, local.length),
    )


def _prepare(keys: Sequence[tuple], device: torch.device) -> list[Kind]:
    """Those with most tiles first: the host makes the next one meanwhile."""
    table, kinds = list[tuple[int, ...]](), dict[tuple, list[tuple[int, int, int]]]()
    for number, key in enumerate(keys):
        source, *of_source, target, shape, strides, dtype = key[:8]
        if 0 in shape:
            table.append((0,) * 8)
            continue
        call = plan(*of_source, source % 4 == 0, shape, strides, dtype, target % 4 == 0, *key[8:])
        table.append((source, target, *call.sizes))
        aligned = source % 16 == target % 16 == 0 and not any(size % 8 for size in call.sizes[1:4])
        programs = kinds.setdefault((*call.constants.items(), ("ALIGNED", aligned)), [])
        ends = range(0, call.tiles, call.per_program)
        programs += [(number, tile, min(tile + call.per_program, call.tiles)) for tile in ends]
    slices = torch.tensor(table, dtype=torch.int64).to(device)
    return [
        Kind(slices, torch.tensor(programs, dtype=torch.int32).to(device), dict(kind))
        for kind, programs in sorted(kinds.items(), key=lambda both: -len(both[1]))
        if programs
    ]


class KernelLaunch(NamedTuple):
    """What the kernel needs of a slice, but for its addresses."""

    tiles: int
    per_program: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]


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
    whole = tuple(_numel(shape[dim + 1 :]) for dim in range(len(shape)))
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
    # the same for most slices, so that they are one kind
    BC = TILE if grid.rows == 1 else min(TILE, triton.next_power_of_2(columns))
    BR = min(TILE // BC, triton.next_power_of_2(grid.rows))
    tiles = triton.cdiv(grid.rows, BR) * triton.cdiv(columns, BC)
    per_program = min(TILES, 1 << (max(1, tiles // PROGRAMS).bit_length() - 1))
    farthest = max((grid.rows + BR) * max(grid.strides), _numel(shape)) + 2 * TILE
    strides = grid.strides[1] // half, first // half, grid.strides[2] // half
    return KernelLaunch(
        tiles,
        per_program,
        (grid.rows, columns, own_stride, *strides),
        {
            "SOURCE": _INTEGER[4 if pairs and not cast else source_dtype.itemsize],
            "TARGET": _INTEGER[4 if pairs else target_dtype.itemsize],
            "CAST": cast,
            "PAIRS": pairs and cast != _COPY,
            "BR": BR,
            "BC": BC,
            "WIDE": farthest >= 2**31,
        },
    )


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
