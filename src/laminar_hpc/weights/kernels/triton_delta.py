"""Triton: the changed elements of an image as (index, value).

Encoding reads both images once. A first pass writes a bit per element and a count per block; the counts'
running sum, which torch makes, says where each block's elements go; a second pass reads the bits, and of the
image only what has changed.
"""

import torch
import triton
import triton.language as tl

from laminar_hpc.weights.kernels.reference import Delta, bits

BLOCK = 4096  # elements per program; a lane of the second pass takes the 32 of one word of bits


@triton.jit
def _ones(word):
    """How many bits of each word (uint32) are set, by adding neighbours."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def mark_kernel(new, old, marks, counts, length, BLOCK: tl.constexpr, HALVES: tl.constexpr):
    """new, old int32 or int16 [length]: elements, or words of two 16-bit elements each (HALVES), which halves
    the work per element.

    marks int32 [blocks * BLOCK / 32]: bit b of word w is element 32 w + b. counts int32 [blocks].
    """
    block = tl.program_id(0)
    WORDS: tl.constexpr = BLOCK // 32
    LOADED: tl.constexpr = 16 if HALVES else 32  # per word of marks
    at = block * (WORDS * LOADED) + tl.arange(0, WORDS * LOADED)
    differ = tl.load(new + at, mask=at < length, other=0) ^ tl.load(old + at, mask=at < length, other=0)
    if HALVES:
        changed = ((differ & 0xFFFF) != 0).to(tl.int32) | (((differ >> 16) != 0).to(tl.int32) << 1)
    else:
        changed = (differ != 0).to(tl.int32)
    shifts = tl.arange(0, LOADED) * (32 // LOADED)
    words = tl.sum(tl.reshape(changed, [WORDS, LOADED]) << shifts[None, :], axis=1)
    tl.store(marks + block * WORDS + tl.arange(0, WORDS), words)
    tl.store(counts + block, tl.sum(_ones(words.to(tl.uint32, bitcast=True))))


@triton.jit
def _lowest(left, lane):
    """The element of the lowest bit that is set in each word, whether there is one, and the other bits."""
    others = left & (left - 1)
    # a power of two is its float's exponent
    bit = ((left ^ others).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return lane * 32 + bit, left != 0, others


@triton.jit
def compact_kernel(new, marks, ends, indices, values, BLOCK: tl.constexpr):
    """ends int32 [blocks]: how many elements have changed up to the end of each block. indices int32, values
    like `new`."""
    block = tl.program_id(0)
    lane = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    left = tl.load(marks + lane).to(tl.uint32, bitcast=True)
    count = _ones(left)
    place = tl.load(ends + block) - tl.sum(count) + tl.cumsum(count, 0) - count
    for _ in range(0, tl.max(count, 0), 4):  # four loads under way at once
        index_0, there_0, left = _lowest(left, lane)
        index_1, there_1, left = _lowest(left, lane)
        index_2, there_2, left = _lowest(left, lane)
        index_3, there_3, left = _lowest(left, lane)
        value_0 = tl.load(new + index_0, mask=there_0)
        value_1 = tl.load(new + index_1, mask=there_1)
        value_2 = tl.load(new + index_2, mask=there_2)
        value_3 = tl.load(new + index_3, mask=there_3)
        tl.store(indices + place, index_0, mask=there_0)
        tl.store(indices + place + 1, index_1, mask=there_1)
        tl.store(indices + place + 2, index_2, mask=there_2)
        tl.store(indices + place + 3, index_3, mask=there_3)
        tl.store(values + place, value_0, mask=there_0)
        tl.store(values + place + 1, value_1, mask=there_1)
        tl.store(values + place + 2, value_2, mask=there_2)
        tl.store(values + place + 3, value_3, mask=there_3)
        place += 4  # of words with fewer nothing is left


def encode(new: torch.Tensor, old: torch.Tensor) -> Delta:
    """Flat images of equal dtype and length, below 2**31 - BLOCK elements."""
    blocks = triton.cdiv(new.numel(), BLOCK)
    marks = torch.empty(blocks * BLOCK // 32, dtype=torch.int32, device=new.device)
    counts = torch.empty(blocks, dtype=torch.int32, device=new.device)
    if blocks:
        halves = new.element_size() == 2 and new.numel() % 2 == new.data_ptr() % 4 == old.data_ptr() % 4 == 0
        images = [image.view(torch.int32) if halves else bits(image) for image in (new, old)]
        mark_kernel[(blocks,)](
            *images, marks, counts, images[0].numel(), BLOCK=BLOCK, HALVES=halves, num_warps=8
        )
    ends = counts.cumsum(0, dtype=torch.int32)
    changed = int(ends[-1]) if blocks else 0
    delta = Delta(
        torch.empty(changed, dtype=torch.int32, device=new.device),
        torch.empty(changed, dtype=new.dtype, device=new.device),
    )
    if changed:
        compact_kernel[(blocks,)](bits(new), marks, ends, delta.indices, bits(delta.values), BLOCK=BLOCK)
    return delta
