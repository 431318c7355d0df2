"""Transformer Engine's attention for our packs; imported by trainer/building.py where Transformer Engine is installed (GPUs)."""

from dataclasses import fields

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams

from laminar_hpc.trainer.attention import PackLayout


class TransformerEngineAttention(TEDotProductAttention):
    """Megatron's TEDotProductAttention, given the sequences' own ends: a PackLayout names the whole pack as one padded segment for RoPE."""

    def forward(self, *args: object, packed_seq_params: PackLayout, **keywords: object) -> torch.Tensor:
        known = {f.name: getattr(packed_seq_params, f.name) for f in fields(PackedSeqParams)}
        plain = PackedSeqParams(**{**known, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None})
        return super().forward(*args, packed_seq_params=plain, **keywords)
