"""Compiles what SGLang compiles at an engine's first start, so that no run waits for it.

    python -m laminar_hpc.engine.sglang.plugin.compile_units     on a machine with a GPU; `make setup` does it

SGLang and flashinfer keep the results in their caches (SGLANG_JIT_CACHE_DIR, ~/.cache), by source, compiler
and architecture. Another shape, or another kind of GPU, is compiled when an engine needs it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from laminar_hpc.machine.compat import cuda_toolkit

# of an engine: dtype, width of a head, bytes of a token's keys in one layer and rank
SHAPES = (
    (torch.float32, 32, 256),  # the shipped example
    (torch.bfloat16, 64, 256),  # Qwen2.5-0.5B
    (torch.bfloat16, 128, 256),  # Qwen2.5-72B on 8 GPUs
    (torch.bfloat16, 128, 512),  # Qwen2.5-1.5B, Qwen2.5-32B on 4 GPUs
    (torch.bfloat16, 128, 1024),  # Qwen2.5-7B
)
COMPILERS = 4  # at work at once
Unit = tuple[str, Callable[[], object]]


def sglang_units(shapes: tuple = SHAPES) -> Iterator[Unit]:
    """SGLang's own, of its files activation.py, rope.py, kvcache.py and clamp_position.py, each once."""
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module

    for dtype in dict.fromkeys(dtype for dtype, *_ in shapes):
        yield f"activation of {dtype}", lambda dtype=dtype: activation_module(dtype)
    for dtype, head in dict.fromkeys((dtype, head) for dtype, head, _ in shapes):
        yield (
            f"positions of {dtype} in heads of {head}",
            lambda dtype=dtype, head=head: _jit_fused_rope_module(True, head, dtype, dtype),
        )
    for size in dict.fromkeys(size for *_, size in shapes):
        yield f"KV rows of {size} bytes", lambda size=size: _jit_kvcache_module(size, size, 0)
    yield "clamped positions", lambda: _jit_clamp_position_module(torch.int64)


def flashinfer_units() -> Iterator[Unit]:
    """Those of flashinfer that every engine uses. Its sampling is not among them: top-k, top-p and min-p,
    which alone need it, are refused."""
    from flashinfer.norm import get_norm_module

    yield "norms", get_norm_module


def compile_units(units: list[Unit]) -> list[str]:
    """Compiles them side by side. Returns a line for each that could not be."""

    def failure(unit: Unit) -> str:
        name, compiled = unit
        start = time.monotonic()
        try:
            compiled()
        except Exception as error:  # of a compiler, a linker, a loader
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = next((line for line in lines if "error" in line), lines[-1] if lines else "")
            return f"{name}: {type(error).__name__}: {text[:300]}"
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        return ""

    with ThreadPoolExecutor(COMPILERS) as pool:
        return [line for line in pool.map(failure, units) if line]


def main() -> int:
    """Exit code 1 when something did not compile; an engine will try again, and say why."""
    if not torch.cuda.is_available():
        print("there is no GPU here: an engine compiles its kernels at its first start")
        return 0
    os.environ.update(cuda_toolkit.variables())
    failures = compile_units([*sglang_units(), *flashinfer_units()])
    for line in failures:
        print(line, file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
