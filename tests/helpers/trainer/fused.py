"""Layers as Transformer Engine's, which need not be installed: a norm is part of the linear layer behind it,
and the last linear layer of a feed-forward part keeps a view of its input for the backward pass."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from laminar_hpc.trainer.megatron import building
from laminar_hpc.trainer.megatron.attention import PackedCausalAttention


class NormAndLinear(ColumnParallelLinear):
    """RMSNorm and a linear layer."""

    def __init__(self, input_size: int, *args: Any, config: Any, **keywords: Any) -> None:
        super().__init__(input_size, *args, config=config, **keywords)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))
        self._eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self._eps)
        return super().forward(normed, *args, **keywords)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        return (flat @ weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat, weight = ctx.saved_tensors
        rows = gradient.reshape(len(flat), -1)
        return (rows @ weight).view(*gradient.shape[:-1], -1), rows.t() @ flat


class KeepsItsInput(RowParallelLinear):
    """A linear layer of one rank."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Product.apply(x, self.weight), None


def _spec(num_experts: int | None, moe_grouped_gemm: bool, qk_layernorm: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = NormAndLinear
    layer.mlp.submodules.linear_fc1 = NormAndLinear
    layer.mlp.submodules.linear_fc2 = KeepsItsInput
    return spec


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer builds its layers of these, as it does of Transformer Engine's."""
    monkeypatch.setattr(building, "installed", lambda module: module == "transformer_engine")
    monkeypatch.setattr(building, "get_gpt_layer_with_transformer_engine_spec", _spec)
    attention = SimpleNamespace(TransformerEngineAttention=PackedCausalAttention)
    monkeypatch.setitem(sys.modules, "laminar_hpc.trainer.megatron.te_attention", attention)
