"""How bench/kernels.py times a kernel beside torch's own operations and a copy of as many bytes."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch


def time_of(work: Callable[[], object]) -> float:
    """Milliseconds, on the device's clock where there is a GPU."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def compiled_by(options: argparse.Namespace, function: Callable, **more: bool) -> Callable:
    """torch.compile's; on the CPU without its compiler, which takes minutes and proves nothing there."""
    return torch.compile(function, **({} if options.device == "cuda" else {"backend": "eager"}), **more)


def milliseconds(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Medians, in turns; each is run three times before, which compiles it."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(-3, repeats):
        for name, work in works.items():
            took = time_of(work)
            if repeat >= 0:
                times[name].append(took)
    return {name: statistics.median(of_work) for name, of_work in times.items()}


def row(
    kernel: str,
    case: str,
    moved: int,
    options: argparse.Namespace,
    works: dict[str, Callable[[], object]],
) -> dict[str, object]:
    """One line of the table. `works`: ours, eager, compile; `moved`: bytes read and written."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    found = milliseconds({**works, "copy": lambda: target.copy_(source)}, options.repeats)
    rate, copy = moved / found["ours"] / 1e6, 2 * source.numel() / found["copy"] / 1e6
    return {
        "kernel": kernel,
        "case": case,
        "MB": moved / 1e6,
        "ms": found["ours"],
        "GB/s": rate,
        "copy GB/s": copy,
        "over copy": rate / copy,
        "eager ms": found["eager"],
        "compile ms": found["compile"],
        "over eager": found["eager"] / found["ours"],
        "over compile": found["compile"] / found["ours"],
    }
