"""The output layer with float32 logits from bfloat16 hidden states and weights: products are exact and summed in float32, and not rounded.

A logit of 20 rounded to bfloat16 is off by up to 1/16, and engine and trainer round differently, so log-probs would differ by as much.
Called by trainer/building.py; the engine's counterpart is SGLang's --enable-fp32-lm-head. Gradients are Megatron's own, as before.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication as MegatronLinear

_ROWS = 8192  # of the vocabulary, whose float32 copy is held at a time on the CPU


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, hidden] times weight [vocabulary, hidden], of one dtype, bfloat16 or float16 -> [n, vocabulary] float32."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    wide, out = x.float(), torch.empty(len(x), len(weight))  # there is no such product for the CPU
    for part, place in zip(weight.split(_ROWS), out.split(_ROWS, dim=1), strict=True):
        torch.mm(wide, part.float().t(), out=place)
    return out


class _Float32Linear(MegatronLinear):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *options: object) -> torch.Tensor:
        MegatronLinear.forward(ctx, x[:0], weight, *options)  # of no rows: it notes what its backward needs
        ctx.save_for_backward(x, weight)
        return float32_product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return MegatronLinear.backward(ctx, gradient.to(ctx.saved_tensors[1].dtype))


def _forward(
    input: torch.Tensor, weight: torch.Tensor, bias: None, gradient_accumulation_fusion: bool, allreduce_dgrad: bool,
    sequence_parallel: bool, grad_output_buffer: None, wgrad_deferral_limit: int | None, tp_group: object,
) -> torch.Tensor:  # fmt: skip
    options = gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer, wgrad_deferral_limit, tp_group
    flat = _Float32Linear.apply(input.flatten(0, -2), weight, bias, *options)
    return flat.view(*input.shape[:-1], -1)


def to_float32(layer: ColumnParallelLinear) -> None:
    """Makes a layer without bias and sequence parallelism give float32, in place: Megatron's class has its product in this one method."""
    if layer.bias is not None or layer.sequence_parallel:
        raise ValueError("a float32 output layer has neither bias nor sequence parallelism")
    layer._forward_impl = _forward
