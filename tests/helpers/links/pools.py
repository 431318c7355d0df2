"""Pools of random bits, and slot lists as an allocator of pages would give them."""

import torch

from laminar_hpc.engine.kv.frames import DTYPES
from laminar_hpc.engine.kv.pool import Pool

BITS = {4: torch.int32, 2: torch.int16}


def make(dtype="bfloat16", layers=2, heads=2, head_dim=16, page_size=1, pages=64, seed=0):
    """A pool whose every bit pattern is random, NaNs included."""
    draw = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]
    shape = (pages * page_size, heads, head_dim)

    def tensor():
        return torch.randint(-(2**15), 2**15, shape, generator=draw).to(BITS[kind.itemsize]).view(kind)

    return Pool.of([tensor() for _ in range(layers)], [tensor() for _ in range(layers)], page_size)


def slots_of(tokens, page_size=1, pages=64, seed=0):
    """int64 [tokens]: whole pages in random order, the last one in part."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(pages, generator=draw)[: -(-tokens // page_size)]
    return (chosen[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:tokens].contiguous()


def bits(tensor):
    return tensor.view(BITS[tensor.element_size()])


def same(source, source_slots, target, target_slots):
    """Whether the rows are equal bit by bit, by torch's own indexing."""
    pairs = zip(source.tensors, target.tensors, strict=True)
    return all(torch.equal(bits(a)[source_slots], bits(b)[target_slots]) for a, b in pairs)


def on_gpu(pool: Pool) -> Pool:
    tensors = [tensor.cuda() for tensor in pool.tensors]
    return Pool.of(tensors[0::2], tensors[1::2], pool.shape.page_size)
