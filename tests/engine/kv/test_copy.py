"""Gather and scatter against torch's own indexing, over shapes, page sizes, dtypes, threads and instruction
sets."""

import os
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.links.pools import bits, make, same, slots_of
from laminar_hpc import _kv
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import CHUNK_HEAD_BYTES
from laminar_hpc.engine.kv.pool import Pool, gather, scatter, use_huge_pages
from laminar_hpc.weights.kernels.sums import tensor_sums


@pytest.mark.parametrize("isa", [1, 2, 3])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "page_size", "tokens"),
    [
        ("bfloat16", 4, 128, 1, 61),
        ("bfloat16", 4, 32, 1, 34),
        ("float32", 2, 64, 16, 100),
        ("float16", 1, 5, 64, 65),
        ("bfloat16", 3, 80, 7, 20),
        ("float32", 1, 1, 1, 1),
    ],
)
def test_rows_arrive_bit_by_bit(dtype, heads, head_dim, page_size, tokens, isa, streaming):
    """Promise: every record's payload is torch's gather, its sums are those of weights/kernels/sums.py, and
    slots not named stay as they were."""
    source = make(dtype, 3, heads, head_dim, page_size, seed=1)
    target = make(dtype, 3, heads, head_dim, page_size, seed=2)
    ours, theirs = slots_of(tokens, page_size, seed=3), slots_of(tokens, page_size, seed=4)
    untouched = torch.ones(len(target.tensors[0]), dtype=torch.bool)
    untouched[theirs] = False
    before = [bits(tensor)[untouched].clone() for tensor in target.tensors]
    for threads, chunk_bytes in ((1, 4096), (3, 1 << 16)):
        records = gather(source, ours, chunk_bytes, threads, isa=isa, streaming=streaming)
        image = torch.cat([bits(tensor)[ours].reshape(-1) for tensor in source.tensors]).view(torch.uint8)
        size, stride = (
            source.shape.rows_per_chunk(chunk_bytes) * source.shape.row_bytes,
            source.shape.record_bytes(chunk_bytes),
        )
        for number in range(source.shape.chunks(tokens, chunk_bytes)):
            payload = image[number * size : (number + 1) * size]
            head = struct.unpack_from("<4sIQQQ", records.numpy(), number * stride)
            assert head == (b"KCVK", number, len(payload), *tensor_sums(payload))
            start = number * stride + CHUNK_HEAD_BYTES
            assert torch.equal(records[start : start + len(payload)], payload)
        scatter(target, theirs, records, chunk_bytes, threads, isa=isa, streaming=streaming)
        assert same(source, ours, target, theirs)
    assert all(
        torch.equal(bits(tensor)[untouched], old) for tensor, old in zip(target.tensors, before, strict=True)
    )


@settings(deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    layers=st.integers(1, 4),
    heads=st.integers(1, 9),
    head_dim=st.sampled_from([1, 3, 8, 32, 40, 64]),
    page_size=st.integers(1, 64),
    tokens=st.integers(1, 90),
    threads=st.integers(1, 4),
    chunk_bytes=st.integers(4096, 40000),
)
def test_any_shape_goes_and_comes_back(
    dtype, layers, heads, head_dim, page_size, tokens, threads, chunk_bytes
):
    """Promise: bit-exact for MHA and GQA pools of any shape."""
    source, target = (
        make(dtype, layers, heads, head_dim, page_size, 90, 1),
        make(dtype, layers, heads, head_dim, page_size, 90, 2),
    )
    ours, theirs = slots_of(tokens, page_size, 90, 3), slots_of(tokens, page_size, 90, 4)
    scatter(target, theirs, gather(source, ours, chunk_bytes, threads), chunk_bytes, threads)
    assert same(source, ours, target, theirs)


def test_a_pool_with_gaps_between_slots():
    """Promise: K and V may share one tensor, so that a slot's stride exceeds its row; unaligned rows need no
    streaming stores."""
    both = torch.randn(64, 2, 4, 16)
    pool = Pool.of([both[:, 0]], [both[:, 1]], 1)
    target, slots = make("float32", 1, 4, 16), slots_of(50)
    scatter(target, slots, gather(pool, slots, 4096, 2), 4096, 2)
    assert same(pool, slots, target, slots)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 63, 64, 4099])
def test_sums_are_the_projects(size):
    """Promise: the checksum in C++ is the one of weights/kernels/sums.py."""
    image = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert _kv.sums(image.numpy()) == (tensor_sums(image) if size else (0, 0))


@pytest.mark.parametrize("place", [0, 5, 9, 17, 30, 33, 64, 200, 700])
def test_a_changed_byte_is_refused(place):
    """Promise: a chunk whose head or payload differs in a bit is refused in one line that names it."""
    pool, slots = make(), slots_of(40)
    records = gather(pool, slots, 4096, 2)
    records[pool.shape.record_bytes(4096) + place] ^= 4
    with pytest.raises(KvRefused, match=r"^KV chunk 1 refused"):
        scatter(pool, slots, records, 4096, 1)


@pytest.mark.parametrize("slots", [[64], [-1], [3, 3], [2**62], []])
def test_slots_that_do_not_fit_are_refused(slots):
    """Promise: nothing outside the pool is read or written, and no slot is written twice."""
    pool, places = make(), torch.tensor(slots, dtype=torch.int64)
    with pytest.raises(KvRefused, match=r"^slots refused"):
        scatter(pool, places, torch.zeros(1 << 16, dtype=torch.uint8), 4096, 1)
    with pytest.raises(ValueError, match=r"slots outside the pool|make no sense"):
        _kv.pack(
            torch.zeros(2, dtype=torch.int64).numpy(),
            torch.tensor([64]).numpy(),
            (64, 64, 64, 4, 1, 0, True),
            bytearray(4096),
        )


def test_pages_in_pieces_and_short_records_are_refused():
    """Promise: a slot list that breaks the page size, and records that are too few, are said in one line."""
    pool = make(page_size=4, pages=16)
    with pytest.raises(KvRefused, match="number 0 is slot 1"):
        gather(pool, torch.tensor([1, 2]), 4096, 1)
    with pytest.raises(KvRefused, match="number 1 is slot 2"):
        gather(pool, torch.tensor([0, 2]), 4096, 1)
    with pytest.raises(KvRefused, match="bytes are needed"):
        scatter(pool, torch.arange(8), torch.zeros(100, dtype=torch.uint8), 4096, 1)


@pytest.mark.parametrize(
    ("keys", "values", "page"),
    [
        ([torch.zeros(8, 2, 4)], [], 1),
        ([torch.zeros(8, 2, 4)], [torch.zeros(8, 2, 5)], 1),
        ([torch.zeros(8, 1, 4, dtype=torch.float64)], [torch.zeros(8, 1, 4, dtype=torch.float64)], 1),
        ([torch.zeros(8, 4)], [torch.zeros(8, 4)], 1),
        ([torch.zeros(8, 2, 4)], [torch.zeros(8, 2, 4)], 65),
        ([torch.zeros(2, 8, 4).transpose(0, 1)], [torch.zeros(2, 8, 4).transpose(0, 1)], 1),
    ],
)
def test_pools_of_another_kind_are_refused(keys, values, page):
    """Promise: MLA pools, other dtypes, other layouts and other page sizes are refused in one line."""
    with pytest.raises(KvRefused, match=r"^KV pool refused"):
        Pool.of(keys, values, page)


def test_huge_pages_change_where_rows_lie_and_nothing_else():
    """Where Linux gives huge pages most of the pool is on them; anywhere its bits and the next copies are the
    same."""

    def huge() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return int(re.search(r"AnonHugePages:\s+(\d+)", text)[1]) * 1024

    source, target = (make(heads=4, head_dim=128, layers=4, pages=8193, seed=seed) for seed in (0, 1))
    before = [bits(tensor).clone() for tensor in source.tensors]
    size = sum(tensor.nbytes for tensor in source.tensors)
    had = huge()
    use_huge_pages(source)
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if (
        allowed.exists()
        and "[never]" not in allowed.read_text()
        and tuple(int(n) for n in os.uname().release.split(".")[:2]) >= (6, 1)
    ):
        assert huge() - had > 0.5 * size
    assert all(torch.equal(a, bits(b)) for a, b in zip(before, source.tensors, strict=True))
    slots, there = slots_of(4096, pages=8193), slots_of(4096, pages=8193, seed=1)
    records = gather(source, slots, 1 << 19, 1)
    scatter(target, there, records, 1 << 19, 1)
    assert same(source, slots, target, there)
