"""The residual stream of bfloat16 models as SGLang has it: a sum is normalized as it is in float32, and
rounded only to be added to.

Megatron rounds the sum first and normalizes what is left; the two differ by a rounding per norm, which is
most of what engine and trainer would then differ by. Between layers and pipeline stages goes the sum in
float32. Plugged in by trainer/megatron/building.py, for Megatron's own layers; Transformer Engine's take
their input in the parameters' dtype only.
"""

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from laminar_hpc.weights.kernels.layers import added, added_and_normed, normed


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm with the arguments that Megatron builds a norm of; Megatron's own (0.16.1,
    transformer/torch_norm.py) refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.centered = config.layernorm_zero_centered_gamma

    def factor(self) -> torch.Tensor:
        """What the normalized input is multiplied with: the weight, or 1 and the weight in float32."""
        return 1.0 + self.weight.float() if self.centered else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the backward pass keeps it: of the keys, which are a view, that would be queries and values too
        x = x.contiguous()
        if not self.centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, self.factor(), self.eps).to(x.dtype)


class SumNorm(Norm):
    """RMSNorm of a sum in float32, or of an embedding, computed in float32; the result is of the weight's
    dtype. A `SumAdding` before it has computed it with the sum."""

    ready: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ready, self.ready = self.ready, None
        if ready is not None and ready[0] is x:
            return ready[1]
        return normed(x, self.factor(), self.eps).to(self.weight.dtype)


class SumAdding:
    """In the place of Megatron's bias, dropout and addition: output and residual [tokens, 1, hidden] -> their
    sum in float32, and for `norm`, if it takes that sum next, its result."""

    def __init__(self, norm: SumNorm | None = None) -> None:
        self.norm = norm

    def __call__(self, training: bool, fused: bool) -> Callable:
        return self._add

    def _add(
        self, output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        output, bias = output_with_bias
        if bias is not None or dropout:
            raise ValueError("a float32 residual sum knows neither bias nor dropout")
        if self.norm is None:
            return added(output, residual)
        total, value = added_and_normed(output, residual, self.norm.factor(), self.norm.eps)
        self.norm.ready = total, value.to(self.norm.weight.dtype)
        return total


def _adding(training: bool, fused: bool) -> Callable:
    return SumAdding()(training, fused)


def sum_in_float32(spec: ModuleSpec) -> None:
    """Of a layer's spec, in place: its two norms and its two additions."""
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SumNorm
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = _adding


def join_sums_and_norms(decoder: TransformerBlock, across_layers: bool) -> None:
    """Of layers whose spec is `sum_in_float32`'s: each sum is computed with the norm that takes it.
    `across_layers`: also where that is the next layer's, or the last norm."""
    layers = list(decoder.layers)
    for layer, behind in zip(layers, [*layers[1:], None], strict=True):
        # Megatron turns gradients on here, also in the first pass of a layer that is recomputed whole
        layer.bias_dropout_add_exec_handler = contextlib.nullcontext
        layer.self_attn_bda = SumAdding(layer.pre_mlp_layernorm)
        following = decoder.final_layernorm if behind is None else behind.input_layernorm
        layer.mlp_bda = SumAdding(following if across_layers else None)
