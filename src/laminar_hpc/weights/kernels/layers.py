"""RoPE, and the residual sum with the norm behind it, each in one pass forward and one backward, rounded
where SGLang rounds.

The functions here choose: tensors on a GPU go to triton_layers.py, all others to plain torch, which is the
kernels' reference and rounds alike.
"""

from typing import Any

import torch
import torch.nn.functional as F


class _Rotate(torch.autograd.Function):
    """On a GPU. The gradient is rotated back."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from laminar_hpc.weights.kernels.triton_layers import rotate as on_gpu

        ctx.save_for_backward(cos, sin)
        return on_gpu(query, key, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, of_query: torch.Tensor, of_key: torch.Tensor) -> tuple:
        from laminar_hpc.weights.kernels.triton_layers import rotate as on_gpu

        cos, sin = ctx.saved_tensors
        return *on_gpu(of_query, of_key, cos, sin, -1.0), None, None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] of any dtype, rotated in float32 by plain torch and rounded once."""
    wide = x.float()
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [tokens, heads, head_dim] and key [tokens, key heads, head_dim], rotated in float32 and rounded
    once, as the engines do. cos and sin float32 [tokens, 1, head_dim]: the cosine, and the sine with the sign
    of its half (RoPE, Su et al., arXiv 2104.09864, equation 34, in halves)."""
    if query.is_cuda:
        return _Rotate.apply(query, key, cos, sin)
    return rotated(query, cos, sin), rotated(key, cos, sin)


class _SumNorm(torch.autograd.Function):
    """On a GPU. Without an output `residual` alone is normalized."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        from laminar_hpc.weights.kernels.triton_layers import norm as on_gpu

        output, residual = None if output is None else output.contiguous(), residual.contiguous()
        total, normed, scales = on_gpu(output, residual, weight, epsilon)
        ctx.save_for_backward(total, scales, weight)
        ctx.dtypes = None if output is None else output.dtype, residual.dtype
        ctx.set_materialize_grads(False)
        return (None if output is None else total), normed

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor | None, of_normed: torch.Tensor | None) -> tuple:
        from laminar_hpc.weights.kernels.triton_layers import norm_gradient as on_gpu

        total, scales, weight = ctx.saved_tensors
        if of_normed is None:
            of_normed = torch.zeros_like(total, dtype=weight.dtype)
        of_total = None if of_total is None else of_total.contiguous()
        found = on_gpu(of_normed.contiguous(), of_total, total, scales, weight, *ctx.dtypes)
        return found[0], found[1], found[2].to(weight.dtype), None


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of x [..., hidden], computed in float32 and rounded to the weight's dtype (Zhang and Sennrich,
    arXiv 1910.07467, equation 4)."""
    if _fits(x):
        return _SumNorm.apply(None, x, weight, epsilon)[1]
    return F.rms_norm(x.float(), weight.shape, weight.float(), epsilon).to(weight.dtype)


def added(output: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """[..., hidden] both -> their sum in float32, of the residual rounded to the output's dtype."""
    return output.float() + residual.to(output.dtype).float()


def added_and_normed(
    output: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`added`, and `normed` of it; on a GPU 12 bytes of each element are moved for both, 16 for the
    gradient, where plain operations move 26 and more."""
    if _fits(residual):
        return _SumNorm.apply(output, residual, weight, epsilon)
    total = added(output, residual)
    return total, normed(total, weight, epsilon)


def _fits(x: torch.Tensor) -> bool:
    if not x.is_cuda:
        return False
    from laminar_hpc.weights.kernels.triton_layers import WIDEST

    return x.shape[-1] <= WIDEST
