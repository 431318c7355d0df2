"""Moving one request's KV cache: gather, scatter, shared memory and loopback TCP against memcpy of the same
bytes, and SGLang's own copies.

    python bench/kv_migration.py --json kv.json                 28 layers, 4 KV heads of 128 in bf16,
                                                                4,096 tokens, 1 and 2 threads
    python bench/kv_migration.py --tokens 16384 --threads 8     another length; as many threads on either side

The pages lie in random slots of two pools (page size 1). All kinds take turns in every repeat, a row each;
checksums are included. `shm` is a whole move to another process: the offer's file, gathering, scattering,
acceptance. `tcp` is one through encrypted TCP over loopback, connections and key exchange included.
`over_stock_copy` is the time of get_cpu_copy on one pool and load_cpu_copy into the other, by SGLang's
MHATokenToKVPool on the CPU, over that of gather and scatter together.

Figures are medians of the repeats' ratios, and of the numbers of threads the lower one. Goals:
`gather_over_memcpy` and `scatter_over_memcpy` at least 0.7, `shm_over_memcpy` at least 0.35,
`over_stock_copy` at least 3.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable

import common
import numpy as np
import torch

from laminar_hpc import _kv
from laminar_hpc.engine.kv import pool as kv_pool
from laminar_hpc.engine.kv.frames import PartHeader
from laminar_hpc.engine.kv.inbox import Expected, KvInbox
from laminar_hpc.engine.kv.pool import Pool, aligned
from laminar_hpc.engine.kv.shm import CHUNK_BYTES, ShmOffer, Taken
from laminar_hpc.engine.kv.transfer import TCP_CHUNK_BYTES, send_part

LAYERS, HEADS, HEAD_DIM = 28, 4, 128
GATHER_BYTES = (
    1 << 19
)  # of a chunk that is gathered into, or scattered from, plain memory; the ring has its own size
FIGURES = (
    "gather_over_memcpy",
    "scatter_over_memcpy",
    "shm_over_memcpy",
    "tcp_over_memcpy",
    "over_stock_copy",
)
COLUMNS = ("threads", "repeat", "memcpy GB/s", *FIGURES)


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=9)
    options.add_argument("--tokens", type=int, default=4096, help="default 4096")
    options.add_argument(
        "--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2], help="default 1,2"
    )
    options = options.parse_args()
    rows = [row for threads in options.threads for row in measure(options, threads)]
    figures = {
        name: min(
            common.median([row[name] for row in rows if row["threads"] == threads])
            for threads in options.threads
        )
        for name in FIGURES
    }
    each = {
        f"{name}_{n}_threads": common.median([r[name] for r in rows if r["threads"] == n])
        for name in FIGURES
        for n in options.threads
    }
    common.finish(options, {**figures, **each}, rows, COLUMNS)


def stock_pool(tokens: int):
    """SGLang's own pool on the CPU, filled with random numbers, with room for twice the tokens."""
    from laminar_hpc.machine.compat.torchvision import declare_schemas

    os.environ.setdefault("SGLANG_PLATFORM", "laminar_cpu")
    declare_schemas()
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    made = MHATokenToKVPool(
        size=2 * tokens,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.normal_()
    return made


def receiver(connection, tokens: int, threads: int, slots: torch.Tensor) -> None:
    """The destination's process: a move for each path that it is sent, or an inbox for each "tcp", until
    None."""
    torch.set_num_threads(threads)
    tensors = [torch.ones(2 * tokens + 1, HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    target = Pool.of(tensors[:LAYERS], tensors[LAYERS:], 1)
    kv_pool.use_huge_pages(target)
    connection.send("ready")
    while path := connection.recv():
        if path == "tcp":
            inbox = KvInbox(Expected("bench", 0, target, slots, threads), "127.0.0.1", "here")
            connection.send(inbox.address)
            connection.recv()
            inbox.close()
            inbox.ended(10)
            continue
        with Taken(path) as taken:
            taken.receive(target, slots, threads)
            taken.accept()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(options: argparse.Namespace, threads: int) -> list[dict]:
    """A row per repeat, after one that is not counted."""
    torch.set_num_threads(threads)
    tokens, draw = options.tokens, torch.Generator().manual_seed(0)
    source, target = stock_pool(tokens), stock_pool(tokens)
    ours, theirs = Pool.of(source.k_buffer, source.v_buffer, 1), Pool.of(target.k_buffer, target.v_buffer, 1)
    for pool in (ours, theirs):
        kv_pool.use_huge_pages(pool)
    there, here = (torch.randperm(2 * tokens, generator=draw)[:tokens] for _ in range(2))
    size = 2 * LAYERS * tokens * ours.shape.row_bytes
    records = aligned(ours.shape.record_bytes(GATHER_BYTES) * ours.shape.chunks(tokens, GATHER_BYTES)).zero_()
    plan = ours.plan(there, GATHER_BYTES, threads, distinct=False)
    one, other = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    header = PartHeader.of("bench", 0, ours.shape, list(range(tokens)), CHUNK_BYTES)
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=receiver, args=(its, tokens, threads, here), daemon=True)
    process.start()
    if not mine.poll(300):
        raise SystemExit("the destination's process said nothing for 300 s")
    mine.recv()

    def move() -> None:
        with ShmOffer(header) as offer:
            mine.send(offer.path)
            offer.send(ours, there, threads)

    def move_by_tcp() -> float:
        mine.send("tcp")
        address = mine.recv()
        part = PartHeader.of("bench", 0, ours.shape, list(range(tokens)), TCP_CHUNK_BYTES)
        taken = seconds(
            lambda: send_part(address, part, ours, there, machine="elsewhere", folder="", threads=threads)
        )
        mine.send("done")
        return taken

    rows = []
    for repeat in range(-1, options.repeats):
        plain = seconds(lambda: _kv.memcpy(other, one, threads))
        gathered = seconds(lambda: _kv.pack(*plan, records.numpy()))
        scattered = seconds(lambda: kv_pool.scatter(theirs, here, records, GATHER_BYTES, threads))
        moved = seconds(move)
        by_tcp = move_by_tcp()
        stock = seconds(lambda: target.load_cpu_copy(source.get_cpu_copy(there), here))
        ratios = (
            plain / gathered,
            plain / scattered,
            plain / moved,
            plain / by_tcp,
            stock / (gathered + scattered),
        )
        if repeat >= 0:
            rows.append(
                {
                    "threads": threads,
                    "repeat": repeat,
                    "memcpy GB/s": size / plain / 1e9,
                    **dict(zip(FIGURES, ratios, strict=True)),
                }
            )
    mine.send(None)
    process.join(30)
    return rows


if __name__ == "__main__":
    main()
