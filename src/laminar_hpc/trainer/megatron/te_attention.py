"""Transformer Engine's attention for our packs; imported by trainer/megatron/building.py where Transformer
Engine is installed (GPUs)."""

from dataclasses import fields

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams

from laminar_hpc.trainer.megatron.attention import PackLayout, rotated


class TransformerEngineAttention(TEDotProductAttention):
    """RoPE by the PackLayout's factors, then Megatron's TEDotProductAttention on plain PackedSeqParams."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *args: object,
        packed_seq_params: PackLayout,
        **keywords: object,
    ) -> torch.Tensor:
        assert packed_seq_params.rotation is not None
        query, key = rotated(query, packed_seq_params.rotation), rotated(key, packed_seq_params.rotation)
        plain = PackedSeqParams(
            **{f.name: getattr(packed_seq_params, f.name) for f in fields(PackedSeqParams)}
        )
        return super().forward(query, key, *args, packed_seq_params=plain, **keywords)
