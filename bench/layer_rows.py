"""The rows of bench/kernels.py for what layers compute beside products of matrices: RoPE of queries and keys,
and the residual sum with the norm behind it, forward and backward. A pack of tokens in bfloat16, with the
residual in float32; bytes are those that must move. Torch's own operations, eager and compiled, do the same.
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from kernel_timing import compiled_by, row

from laminar_hpc.weights.kernels import layers

TOKENS = 8192
Tensors = tuple[torch.Tensor, ...]


def layer_rows(options: argparse.Namespace) -> list[dict[str, object]]:
    """RoPE, the sum and norm, and their gradient."""
    tokens = TOKENS if options.device == "cuda" else 64
    return [rope_row(options, tokens), *norm_rows(options, tokens)]


def checked(ours: Tensors, plain: Tensors, what: str) -> None:
    """Both give the same but for the order of sums, which may round one bfloat16 differently."""
    for own, expected in zip(ours, plain, strict=True):
        apart = (own.float() - expected.float()).abs().max() / expected.float().abs().max()
        if not apart <= 2**-7:
            sys.exit(f"{what}: the kernel's values are {apart:.2g} of the largest one from torch's")


def rope_row(options: argparse.Namespace, tokens: int) -> dict[str, object]:
    s, device = options.shape, options.device
    query, key = (
        torch.randn(tokens, heads, s.head_dim, device=device, dtype=torch.bfloat16)
        for heads in (s.heads, s.kv_heads)
    )
    cos, sin = torch.rand(2, tokens, 1, s.head_dim, device=device)

    def plain() -> Tensors:
        return layers.rotated(query, cos, sin), layers.rotated(key, cos, sin)

    checked(layers.rotate(query, key, cos, sin), plain(), "RoPE")
    works = {
        "ours": lambda: layers.rotate(query, key, cos, sin),
        "eager": plain,
        "compile": compiled_by(options, plain),
    }
    moved = 2 * (query.nbytes + key.nbytes) + cos.nbytes + sin.nbytes
    return row("rope", f"{tokens} tokens", moved, options, works)


def plain_sum_and_norm(output: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """As layers.py computes it without a GPU."""
    total = layers.added(output, residual)
    return total, F.rms_norm(total, weight.shape, weight.float(), 1e-6).to(weight.dtype)


def norm_rows(options: argparse.Namespace, tokens: int) -> list[dict[str, object]]:
    hidden, device = options.shape.hidden, options.device
    output = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(tokens, hidden, device=device, requires_grad=True)
    weight = torch.rand(hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    inputs = output, residual, weight
    gradients = torch.randn(tokens, hidden, device=device), torch.randn_like(output)
    functions: dict[str, Callable[..., Tensors]] = {
        "ours": lambda *tensors: layers.added_and_normed(*tensors, 1e-6),
        "eager": plain_sum_and_norm,
        "compile": compiled_by(options, plain_sum_and_norm),
    }
    made = {name: function(*inputs) for name, function in functions.items()}

    def backward(name: str) -> Tensors:
        return torch.autograd.grad(made[name], inputs, gradients, retain_graph=True)

    checked(made["ours"], made["eager"], "sum and norm")
    checked(backward("ours"), backward("eager"), "gradient of sum and norm")
    forward = {name: lambda name=name: functions[name](*inputs) for name in functions}
    behind = {name: lambda name=name: backward(name) for name in functions}
    return [
        row("sum and norm", f"{tokens} tokens", 12 * output.numel(), options, forward),
        row("its gradient", f"{tokens} tokens", 16 * output.numel(), options, behind),
    ]
