"""Megatron parameters <-> Hugging Face tensors, as one table: each row says where a Hugging Face tensor lies
inside a Megatron parameter.

Used by trainer/megatron/policy.py, both to load and to write or publish. A row gives a *view* of the local
shard, so one table serves both ways: loading copies into the views, writing copies out of them. Knows nothing
of torch.distributed; a tensor-parallel shard is (rank, size).
"""

import sys
from collections.abc import Iterable, Sequence

import torch

from laminar_hpc.config.adapters import ADAPTER_PREFIX
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.families import Family
from laminar_hpc.weights.experts import expert_rows
from laminar_hpc.weights.hf import ModelShape
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.layouts import (
    Layout,
    Shard,
    columns,
    gate,
    gate_of_both,
    key,
    query,
    up,
    up_of_both,
    value,
    vocabulary,
    whole,
)

# Hugging Face tensor, Megatron parameter, how the one lies in the other; in the order of a Hugging Face state
# dict.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST: tuple[tuple[str, str, Layout], ...] = ((EMBEDDING, "embedding.word_embeddings.weight", vocabulary),)
LAYER: tuple[tuple[str, str, Layout], ...] = (
    ("self_attn.q_proj.weight", "self_attention.linear_qkv.weight", query),
    ("self_attn.q_proj.bias", "self_attention.linear_qkv.bias", query),
    ("self_attn.k_proj.weight", "self_attention.linear_qkv.weight", key),
    ("self_attn.k_proj.bias", "self_attention.linear_qkv.bias", key),
    ("self_attn.v_proj.weight", "self_attention.linear_qkv.weight", value),
    ("self_attn.v_proj.bias", "self_attention.linear_qkv.bias", value),
    ("self_attn.o_proj.weight", "self_attention.linear_proj.weight", columns),
    ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", whole),
    ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", whole),
    ("mlp.gate_proj.weight", "mlp.linear_fc1.weight", gate),
    ("mlp.up_proj.weight", "mlp.linear_fc1.weight", up),
    ("mlp.down_proj.weight", "mlp.linear_fc2.weight", columns),
)
FUSED_MLP: tuple[tuple[str, str, Layout], ...] = (
    ("mlp.gate_up_proj.weight", "mlp.linear_fc1.weight", gate_of_both),
    ("mlp.gate_up_proj.weight", "mlp.linear_fc1.weight", up_of_both),
)
NORMS = {  # where a norm stands -> its Megatron parameters: Transformer Engine fuses one into what follows it
    "before_attention": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "after_attention": ("norm_after_attention.weight",),
    "before_mlp": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "after_mlp": ("norm_after_mlp.weight",),
}
LAST: tuple[tuple[str, str, Layout], ...] = (
    ("model.norm.weight", "decoder.final_layernorm.weight", whole),
    (HEAD, "output_layer.weight", vocabulary),
)
# The last pipeline stage of a tied model has a copy of the embedding as its head.
TIED_LAST: tuple[tuple[str, str, Layout], ...] = (
    LAST[0],
    (EMBEDDING, "output_layer.weight", vocabulary),
)


def depth(name: str) -> int:
    """Where in the model a tensor is, of Hugging Face's or of an adapter, in whole layers: their order."""
    if name == EMBEDDING:
        return -1
    parts = name.removeprefix(ADAPTER_PREFIX).split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else sys.maxsize


def layer_rows(family: Family) -> list[tuple[str, str, Layout]]:
    """Of one layer without experts, in the order of a Hugging Face state dict."""
    rows = [row for row in LAYER if not (family.fused_mlp and row[2] in (gate, up))]
    if family.fused_mlp:
        before = next(i for i, row in enumerate(rows) if row[0] == "mlp.down_proj.weight")
        rows[before:before] = FUSED_MLP
    for name, place in family.norms:
        rows += [(f"{name}.weight", parameter, whole) for parameter in NORMS[place]]
    return rows


def local_slices(
    parameters: dict[str, torch.Tensor], shape: ModelShape, first_layer: int = 0, shard: Shard | None = None
) -> list[LocalSlice]:
    """Every Hugging Face slice that these local parameters hold, in the order of a Hugging Face state dict.

    `parameters` are named as in GPTModel.named_parameters(); `first_layer` is the global index of
    decoder.layers.0 (pipeline stages). Raises LaminarError when a parameter has no row: a silent gap would
    train weights that are never served.
    """
    shard = shard or Shard()
    local_layers = 1 + max(
        (int(n.split(".")[2]) for n in parameters if n.startswith("decoder.layers.")), default=-1
    )
    of_layer = [*layer_rows(shape.family), *expert_rows(shape, shard)]
    rows = [*FIRST]
    for i in range(local_layers):
        rows += [
            (f"model.layers.{first_layer + i}.{hf}", f"decoder.layers.{i}.{name}", layout)
            for hf, name, layout in of_layer
        ]
    rows += TIED_LAST if shape.tied else LAST
    return slices_of(rows, parameters, shape, shard)


def slices_of(
    rows: Sequence[tuple[str, str, Layout]],
    parameters: dict[str, torch.Tensor],
    shape: ModelShape,
    shard: Shard,
) -> list[LocalSlice]:
    """Of the rows whose parameters are there. Raises LaminarError when one of the parameters has no row."""
    slices = []
    for hf, name, layout in rows:
        if name in parameters:
            t = parameters[name].detach()
            dim, start, total, view = layout(t, shape, shard)
            whole_shape = (*t.shape[:dim], total, *t.shape[dim + 1 :])
            length = view.numel() // (t.numel() // t.shape[dim])
            slices.append(LocalSlice(hf, whole_shape, dim, start, length, view))
    unmapped = set(parameters) - {name for _, name, _ in rows}
    if unmapped:
        raise LaminarError(
            f"Megatron parameters without a row in weights/mapping.py: {', '.join(sorted(unmapped))}"
        )
    return slices


def check_names(wanted: Iterable[str], there: set[str], tied: bool, where: str) -> None:
    """A directory must hold exactly the model's tensors. A tied model may carry its head once more, with
    the same values (trainer/megatron/loading.py); RoPE tables are recomputed."""
    wanted = set(wanted)
    surplus = {
        n for n in there - wanted if not n.endswith("rotary_emb.inv_freq") and not (tied and n == HEAD)
    }
    if wanted - there or surplus:
        raise LaminarError(
            f"{where} does not fit its config.json: missing {sorted(wanted - there)[:3]}, not known "
            f"{sorted(surplus)[:3]}; check tie_word_embeddings and model_type, or download the model again"
        )
