"""A request's KV on a GPU: gather and scatter of all layers against a device copy of as many bytes, and the
whole way to and from the host.

    python bench/kv_device.py --json kv_device.json     28 layers, 4 KV heads of 128 in bf16, 4,096 tokens
    python bench/kv_device.py --device cpu --tokens 64  the same way through plain torch, to try it

`make bench-gpu` does the same.

The tokens lie in random slots. `stage` is gathering into pinned host memory, or scattering from it, against a
copy of the same bytes between pinned memory and the GPU. Checksums are included, and so is what the host does
for each call; of two calls of gather or scatter the second counts. Figures are medians of the repeats'
ratios; goals 0.7 for gather and scatter, 0.8 for `stage`.
`stage_over_sglang`: SGLang's own get_cpu_copy of the same tokens over gathering them into pinned memory, null
where SGLang is not installed; goal 3.
"""

import functools
import importlib.util
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import common
import torch

from laminar_hpc import _kv
from laminar_hpc.engine.kv import device
from laminar_hpc.engine.kv.device import Stage
from laminar_hpc.engine.kv.pool import Pool

LAYERS, HEADS, HEAD_DIM = 28, 4, 128
FIGURES = (
    "gather_over_copy",
    "scatter_over_copy",
    "stage_out_over_copy",
    "stage_in_over_copy",
    "stage_over_sglang",
)


def sglang_copy(pool: Pool, slots: torch.Tensor) -> Callable[[], object] | None:
    """SGLang's own copy of the slots to the host."""
    if importlib.util.find_spec("sglang") is None:
        return None
    from laminar_hpc.engine.sglang.plugin import platform

    platform.activate()  # before SGLang is imported
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    buffers = SimpleNamespace(
        use_hnd=False,
        cpu_offloading_chunk_size=8192,
        layer_num=LAYERS,
        k_buffer=pool.tensors[0::2],
        v_buffer=pool.tensors[1::2],
    )
    return lambda: MHATokenToKVPool.get_cpu_copy(buffers, slots)


def seconds(work: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    torch.cuda.synchronize()  # of streams of their own too
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=20)
    options.add_argument("--tokens", type=int, default=4096, help="default 4096")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    options = options.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit(
            "bench/kv_device.py needs an NVIDIA GPU, and torch sees none here; "
            "run it on a machine that has one, or with --device cpu"
        )
    if on_gpu and not hasattr(_kv, "device_gather"):
        sys.exit("bench/kv_device.py needs the extension's GPU part: install nvcc, then run make setup again")
    tokens = options.tokens
    tensors = [
        torch.randn(2 * tokens + 1, HEADS, HEAD_DIM, device=options.device).to(torch.bfloat16)
        for _ in range(2 * LAYERS)
    ]
    pool, slots = (
        Pool.of(tensors[:LAYERS], tensors[LAYERS:], 1),
        torch.randperm(2 * tokens)[:tokens].to(options.device),
    )
    stage = Stage.of(pool, tokens)
    image, other = (
        torch.empty(stage.image.shape, dtype=torch.bfloat16, device=options.device) for _ in range(2)
    )
    theirs, rows = sglang_copy(pool, slots), []
    moves: list[Callable] = [device.gather, device.scatter]
    if on_gpu:  # the kernels alone, without the copy over the bus
        moves = [functools.partial(device._run, name) for name in ("device_gather", "device_scatter")]
    for repeat in range(-1, options.repeats):
        copy, out, back = (
            seconds(lambda a=a, b=b: a.copy_(b, non_blocking=True))
            for a, b in ((other, image), (stage.image, image), (image, stage.image))
        )
        gathered, scattered = (
            [seconds(lambda move=move: move(pool, slots, image)) for _ in range(2)][1] for move in moves
        )
        filled, emptied = seconds(lambda: stage.fill(pool, slots)), seconds(lambda: stage.empty(pool, slots))
        ratios = (
            copy / gathered,
            copy / scattered,
            out / filled,
            back / emptied,
            seconds(theirs) / filled if theirs else None,
        )
        if repeat >= 0:
            rows.append(
                {
                    "repeat": repeat,
                    "copy GB/s": image.nbytes / copy / 1e9,
                    **dict(zip(FIGURES, ratios, strict=True)),
                }
            )
    common.finish(
        options,
        {name: common.median([row[name] for row in rows]) for name in FIGURES},
        rows,
        ("repeat", "copy GB/s", *FIGURES),
    )


if __name__ == "__main__":
    main()
