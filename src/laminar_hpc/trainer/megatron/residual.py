"""The residual stream of bfloat16 models as SGLang has it: a sum is normalized as it is in float32, and
rounded only to be added to.

Megatron rounds the sum first and normalizes what is left; the two differ by a rounding per norm, which is
most of what engine and trainer would then differ by. Between layers and pipeline stages goes the sum in
float32. Plugged in by trainer/megatron/building.py, for Megatron's own layers; Transformer Engine's take
their input in the parameters' dtype only.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm with the arguments that Megatron builds a norm of; Megatron's own (0.16.1,
    transformer/torch_norm.py) refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the backward pass keeps it: of the keys, which are a view, that would be queries and values too
        return super().forward(x.contiguous())


class SumNorm(Norm):
    """RMSNorm of a sum in float32, or of an embedding, computed in float32; the result is of the weight's
    dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = torch.nn.functional.rms_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.eps
        )
        return normalized.to(self.weight.dtype)


def _add(output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
    """output and residual [tokens, 1, hidden] -> their sum in float32, of the residual rounded to the
    output's dtype."""
    output, bias = output_with_bias
    if bias is not None or dropout:
        raise ValueError("a float32 residual sum knows neither bias nor dropout")
    return output.float() + residual.to(output.dtype).float()


def _adding(training: bool, fused: bool) -> Callable:
    return _add


def sum_in_float32(spec: ModuleSpec) -> None:
    """Of a layer's spec, in place: its two norms and its two additions."""
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SumNorm
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = _adding
