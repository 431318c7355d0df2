"""Products of bfloat16 models, rounded where SGLang rounds them and nowhere else. Called by
trainer/megatron/building.py.

The output layer gives float32 logits: a logit of 20 rounded to bfloat16 is off by up to 1/16, and so are
log-probs. SGLang's counterpart is --enable-fp32-lm-head. A bias is added before the one rounding, as in
torch's linear; Megatron's own layer rounds the product first. Gradients are Megatron's own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import (
    LinearWithGradAccumulationAndAsyncCommunication as MegatronLinear,
)

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_ROWS = 8192  # of the vocabulary, whose float32 copy is held at a time on the CPU


def float32_product(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
    """x [n, hidden] times weight [vocabulary, hidden], of one dtype, bfloat16 or float16 -> [n, vocabulary]
    float32."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    wide, out = x.float(), torch.empty(len(x), len(weight))  # there is no such product for the CPU
    for part, place in zip(weight.split(_ROWS), out.split(_ROWS, dim=1), strict=True):
        torch.mm(wide, part.float().t(), out=place)
    return out


class _Linear(MegatronLinear):
    """Another forward to Megatron's backward. x [n, in], weight [out, in], bias [out] or None; `product` of
    the three gives [n, out]. With sequence parallelism x is this rank's share of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        sequence_parallel: bool,
        *options: object,
    ) -> torch.Tensor:
        # of no rows, which need not be gathered: it notes what its backward needs
        fusion, allreduce, *rest = options
        MegatronLinear.forward(ctx, x[:0], weight, bias, fusion, allreduce, False, *rest)
        ctx.save_for_backward(x, weight)
        ctx.sequence_parallel = sequence_parallel
        rows = gather_from_sequence_parallel_region(x, group=ctx.tp_group) if sequence_parallel else x
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        x, weight, bias, *rest = MegatronLinear.backward(ctx, gradient.to(ctx.saved_tensors[1].dtype))
        return x, weight, bias, None, *rest  # as many as forward has arguments: Megatron's and `product`


class _Frozen(torch.autograd.Function):
    """The product with a weight that has no gradient: nothing of x is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        summed_over: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.summed_over = summed_over
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        (weight,) = ctx.saved_tensors
        of_x = gradient.to(weight.dtype) @ weight
        if ctx.summed_over is not None:
            dist.all_reduce(of_x, group=ctx.summed_over)
        return of_x, None, None, None, None


def _compute_by(layer: ColumnParallelLinear, product: Product) -> None:
    """In place: Megatron's class has its product in this one method."""

    def forward(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: None,
        wgrad_deferral_limit: int | None,
        tp_group: dist.ProcessGroup,
    ) -> torch.Tensor:
        options = (
            gradient_accumulation_fusion,
            allreduce_dgrad,
            grad_output_buffer,
            wgrad_deferral_limit,
            tp_group,
        )
        x = input.flatten(0, -2)
        if weight.requires_grad:
            flat = _Linear.apply(x, weight, bias, product, sequence_parallel, *options)
        else:
            rows = gather_from_sequence_parallel_region(x, group=tp_group) if sequence_parallel else x
            flat = _Frozen.apply(rows, weight, bias, product, tp_group if allreduce_dgrad else None)
        return flat.view(-1, *input.shape[1:-1], flat.shape[-1])

    layer._forward_impl = forward


def float32_output(layer: ColumnParallelLinear) -> None:
    """Makes an output layer without a bias give float32."""
    _compute_by(layer, float32_product)


def bias_before_rounding(layer: ColumnParallelLinear) -> None:
    """Makes a layer with a bias add it to the product in float32."""
    _compute_by(layer, torch.nn.functional.linear)
