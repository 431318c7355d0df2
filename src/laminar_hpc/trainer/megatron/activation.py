"""The gated activation of a feed-forward part, which keeps its input alone for the backward pass: torch's own
graph of the same two operations would keep the gate's activation too. Called by trainer/megatron/building.py.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.mlp import MLP


class _SwiGLU(torch.autograd.Function):
    """Rounds as the operations of the formula do, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        found = torch.empty_like(x)
        of_gate, of_up = found.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return found


class SwiGLU(torch.nn.Module):
    """x [..., 2 * width], the gate's half first -> silu(gate) * up, [..., width] (Shazeer, arXiv 2002.05202,
    equation 6). On a GPU by Megatron's fused kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bias_swiglu_impl(x, None) if x.is_cuda else _SwiGLU.apply(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return {}


class GeGLU(SwiGLU):
    """The same with GELU, approximated by tanh, in the place of silu."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


def use_own_activation(mlp: MLP) -> None:
    """In place. Megatron calls a feed-forward part's module for the whole of the activation where its
    configuration has this flag, which no other module is to see."""
    mlp.config = copy.copy(mlp.config)
    mlp.config.use_te_activation_func = True
    mlp.activation_func = SwiGLU() if mlp.activation_func is F.silu else GeGLU()
