"""Which kernels torch's variable-length attention runs on. FlashAttention 2 is part of torch; FA3 (Hopper)
and FA4 (Hopper, Blackwell) are packages of their own that torch must be told to use. Called once by
trainer/megatron/policy.py, where trainer/megatron/attention.py `takes_packs`.

A package is used only when, in this process and on this device, it gives what FA2 gives, forward and
backward: what it lacks shows in the first second of a run, and the run goes on with FA2 and says so.
"""

import importlib.util
import logging
import os
from collections.abc import Iterator

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

logger = logging.getLogger(__name__)

# name in torch, module that has its kernels, major compute capabilities; the faster one first
_IMPLEMENTATIONS = (
    ("FA4", "flash_attn.cute", (10,)),
    ("FA3", "flash_attn_interface", (9,)),
    ("FA4", "flash_attn.cute", (9,)),
)
_LENGTHS = (70, 1, 257)  # of the pack that both are tried on
_BEFORE = 63  # tokens of the window that is tried, shorter than the longest sequence
_CLOSE = (
    0.03  # largest difference over the largest value: bfloat16 has 8 bits, and sums differ in their order
)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def candidates(major: int) -> Iterator[str]:
    """Names of the installed implementations for a compute capability, the preferred one first."""
    for name, module, majors in _IMPLEMENTATIONS:
        if major in majors and _installed(module):
            yield name


def _attend(
    device: torch.device, heads: tuple[int, int], head_dim: int, before: int = -1
) -> list[torch.Tensor]:
    """Output and gradients of causal attention on a small pack, with `heads` query and key heads, float32; of
    `before` tokens before each, -1: of all."""
    generator, total = torch.Generator().manual_seed(0), sum(_LENGTHS)
    q, k, v = (
        torch.randn(total, n, head_dim, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    )
    ends = torch.tensor([0, *_LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest, grouped = max(_LENGTHS), heads[0] != heads[1]
    out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(before, 0), enable_gqa=grouped)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    return [t.float() for t in (out.detach(), *grads)]


def _differ(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, over the largest value of its tensor; NaN counts as infinite."""
    worst = [
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
        for a, b in zip(found, expected, strict=True)
    ]
    return max(x if x == x else float("inf") for x in worst)


def use_fastest_attention(
    device: torch.device, heads: tuple[int, int], head_dim: int, windowed: bool = False
) -> str:
    """Tells torch to use the best implementation that works for these numbers of query and key heads, and
    where `windowed` with a sliding window. Returns its name; "FA2" is torch's own."""
    # of FA4's kernels, else compiled anew in every process; it is read when the package is imported
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    names = list(candidates(torch.cuda.get_device_capability(device)[0]))
    before = _BEFORE if windowed else -1
    expected = _attend(device, heads, head_dim, before) if names else []
    for name in names:
        try:
            activate_flash_attention_impl(name)
            error = _differ(_attend(device, heads, head_dim, before), expected)
            if error <= _CLOSE:
                logger.info("attention by %s", name)
                return name
            why = f"differs from FA2 by {error:.2g}"
        except Exception as failure:
            # whatever an optional package raises must not end a run that can do without it
            why = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        restore_flash_attention_impl(_raise_warn=False)
        logger.warning("%s is installed and not used: %s", name, why)
    logger.info("attention by FA2, torch's own")
    return "FA2"
