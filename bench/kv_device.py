"""A request's KV on a GPU: gather and scatter of all layers against a device copy of as many bytes, and the
whole way to and from the host.

    python bench/kv_device.py --json kv_device.json     28 layers, 4 KV heads of 128 in bf16, 4,096 tokens

`make bench-gpu` does the same.

The tokens lie in random slots. `stage` is gathering into pinned host memory, or scattering from it, against a
copy of the same bytes between pinned memory and the GPU. Checksums are included. Figures are medians of the
repeats' ratios.
"""

import sys
from collections.abc import Callable

import common
import torch

from laminar_hpc import _kv
from laminar_hpc.kv import device
from laminar_hpc.kv.device import Stage
from laminar_hpc.kv.pool import Pool

LAYERS, HEADS, HEAD_DIM = 28, 4, 128
FIGURES = ("gather_over_copy", "scatter_over_copy", "stage_out_over_copy", "stage_in_over_copy")


def seconds(work: Callable[[], object]) -> float:
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
    options = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "bench/kv_device.py needs an NVIDIA GPU, and torch sees none here; "
            "run it on a machine that has one"
        )
    if not hasattr(_kv, "device_gather"):
        sys.exit("bench/kv_device.py needs the extension's GPU part: install nvcc, then run make setup again")
    tokens = options.tokens
    tensors = [
        torch.randn(2 * tokens + 1, HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
        for _ in range(2 * LAYERS)
    ]
    pool, slots = Pool.of(tensors[:LAYERS], tensors[LAYERS:], 1), torch.randperm(2 * tokens)[:tokens].cuda()
    stage = Stage.of(pool, tokens)
    image, other = (torch.empty(stage.image.shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rows = []
    for repeat in range(-1, options.repeats):
        copy, out, back = (
            seconds(lambda a=a, b=b: a.copy_(b, non_blocking=True))
            for a, b in ((other, image), (stage.image, image), (image, stage.image))
        )
        gathered = seconds(lambda: device._run("device_gather", pool, slots, image))
        scattered = seconds(lambda: device._run("device_scatter", pool, slots, image))
        filled, emptied = seconds(lambda: stage.fill(pool, slots)), seconds(lambda: stage.empty(pool, slots))
        ratios = copy / gathered, copy / scattered, out / filled, back / emptied
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
