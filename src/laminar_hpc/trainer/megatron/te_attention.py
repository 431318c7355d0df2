"""Transformer Engine's attention for our packs; imported by trainer/megatron/building.py where Transformer
Engine is installed (GPUs)."""

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention

from laminar_hpc.trainer.megatron.attention import PackLayout
from laminar_hpc.trainer.megatron.rope import in_halves
from laminar_hpc.weights.kernels.layers import rotate


class TransformerEngineAttention(TEDotProductAttention):
    """RoPE by the PackLayout's factors, then Megatron's TEDotProductAttention, which passes on those fields
    only that PackedSeqParams has (0.16.1, extensions/transformer_engine.py, `kept_packed_seq_params`)."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *args: object,
        packed_seq_params: PackLayout,
        **keywords: object,
    ) -> torch.Tensor:
        rotation = packed_seq_params.rotation_of(self.config, self.layer_number)
        query, key = rotate(*in_halves(self.config, query, key), *rotation)
        return super().forward(query, key, *args, packed_seq_params=packed_seq_params, **keywords)
