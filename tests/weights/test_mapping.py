"""The table Megatron <-> Hugging Face: bit-exact there and back at every tensor-parallel size, without a
gap."""

import math
from dataclasses import replace

import pytest
import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.experts import Experts
from laminar_hpc.weights.hf import FAMILIES, ModelShape
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.layouts import Shard
from laminar_hpc.weights.mapping import check_names, local_slices

SHAPE = ModelShape(
    family=FAMILIES["qwen2"],
    layers=2,
    hidden=24,
    heads=8,
    kv_heads=4,
    head_dim=6,
    ffn=20,
    vocab=50,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
    max_positions=64,
)
QKV = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim


def megatron_parameters(size: int) -> dict[str, torch.Tensor]:
    """One shard's parameters as GPTModel of the local spec has them, zeros."""
    s, vocab = SHAPE, math.ceil(SHAPE.vocab / 32) * 32
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocab // size, s.hidden)}
    for i in range(s.layers):
        shapes |= {
            f"decoder.layers.{i}.input_layernorm.weight": (s.hidden,),
            f"decoder.layers.{i}.self_attention.linear_proj.weight": (s.hidden, s.heads * s.head_dim // size),
            f"decoder.layers.{i}.self_attention.linear_qkv.weight": (QKV // size, s.hidden),
            f"decoder.layers.{i}.self_attention.linear_qkv.bias": (QKV // size,),
            f"decoder.layers.{i}.pre_mlp_layernorm.weight": (s.hidden,),
            f"decoder.layers.{i}.mlp.linear_fc1.weight": (2 * s.ffn // size, s.hidden),
            f"decoder.layers.{i}.mlp.linear_fc2.weight": (s.hidden, s.ffn // size),
        }
    shapes |= {
        "decoder.final_layernorm.weight": (s.hidden,),
        "output_layer.weight": (vocab // size, s.hidden),
    }
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def hf_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        p.name: torch.randn(p.shape, generator=generator) for p in local_slices(megatron_parameters(1), SHAPE)
    }


def load(size: int, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The shards, filled from whole Hugging Face tensors."""
    shards = [megatron_parameters(size) for _ in range(size)]
    for rank, parameters in enumerate(shards):
        for local in local_slices(parameters, SHAPE, shard=Shard(rank, size)):
            local.load(tensors[local.name].narrow(local.dim, local.start, local.length))
    return shards


@pytest.mark.parametrize("size", [1, 2, 4])
def test_roundtrip_is_bit_exact(size: int) -> None:
    """Each shard's slices, put together, are the tensors that were loaded, and every element is in exactly
    one place."""
    tensors = hf_tensors()
    back = {name: torch.full_like(t, math.nan) for name, t in tensors.items()}
    for rank, parameters in enumerate(load(size, tensors)):
        for local in local_slices(parameters, SHAPE, shard=Shard(rank, size)):
            assert local.shape == tuple(tensors[local.name].shape)
            back[local.name].narrow(local.dim, local.start, local.length).copy_(local.value())
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_shards_are_megatrons_own() -> None:
    """Two shards next to each other, by Megatron's rules for splitting, are the one shard of tensor parallel
    1."""
    (one,), (left, right) = load(1, hf_tensors()), load(2, hf_tensors())
    layer = "decoder.layers.1."
    assert torch.equal(
        torch.cat(
            [
                left[layer + "self_attention.linear_qkv.weight"],
                right[layer + "self_attention.linear_qkv.weight"],
            ]
        ),
        one[layer + "self_attention.linear_qkv.weight"],
    )
    assert torch.equal(
        torch.cat([left[layer + "mlp.linear_fc2.weight"], right[layer + "mlp.linear_fc2.weight"]], 1),
        one[layer + "mlp.linear_fc2.weight"],
    )
    gates, ups = zip(*(part[layer + "mlp.linear_fc1.weight"].chunk(2) for part in (left, right)), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), one[layer + "mlp.linear_fc1.weight"])


def test_qkv_interleaves_by_group() -> None:
    """Rows of linear_qkv: the group's two query heads, its key head, its value head, then the next group."""
    tensors = hf_tensors()
    (one,) = load(1, tensors)
    rows, d = one["decoder.layers.0.self_attention.linear_qkv.weight"], SHAPE.head_dim
    q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    group = 2
    expected = torch.cat(
        [
            q[group * 2 * d : (group + 1) * 2 * d],
            k[group * d : (group + 1) * d],
            v[group * d : (group + 1) * d],
        ]
    )
    assert torch.equal(rows[group * 4 * d : (group + 1) * 4 * d], expected)


def test_views_share_memory_where_layouts_agree() -> None:
    """Publishing copies q, k and v only; all else is read in place."""
    parameters = megatron_parameters(1)
    copied = {
        p.name
        for p in local_slices(parameters, SHAPE)
        if p.value().data_ptr() != p.view.data_ptr() or not p.value().is_contiguous()
    }
    assert {name.split(".")[-2] for name in copied} <= {"q_proj", "k_proj", "v_proj"}


def test_pipeline_stages_use_global_layer_numbers() -> None:
    """A stage that begins with layer 5 holds model.layers.5 and on."""
    parameters = {n: t for n, t in megatron_parameters(1).items() if n.startswith("decoder.layers")}
    assert {p.name.split(".")[2] for p in local_slices(parameters, SHAPE, first_layer=5)} == {"5", "6"}


def test_a_parameter_without_a_row_is_refused() -> None:
    """Weights that are trained but never served would be a silent error."""
    with pytest.raises(LaminarError, match=r"without a row.*linear_proj.bias"):
        local_slices(
            {**megatron_parameters(1), "decoder.layers.0.self_attention.linear_proj.bias": torch.zeros(6)},
            SHAPE,
        )


def test_names_of_a_directory_must_fit() -> None:
    """A tied model may bring lm_head.weight along; nothing else may be missing or left over."""
    check_names(
        {"a"}, {"a", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}, tied=True, where="dir"
    )
    for there in ({"a", "lm_head.weight"}, set(), {"a", "b"}):
        with pytest.raises(LaminarError, match=r"dir does not fit its config.json"):
            check_names({"a"}, there, tied=False, where="dir")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_fused_projection_is_bit_exact_there_and_back(size: int) -> None:
    """GLM-4's gate and up projection are one tensor, of which each tensor-parallel shard holds two slices."""
    glm = replace(SHAPE, family=FAMILIES["glm4"])

    def names(parameters: dict[str, torch.Tensor]) -> list[LocalSlice]:
        return [s for s in local_slices(parameters, glm) if "mlp" in s.name and ".0." in s.name]

    (first, second, down) = names(megatron_parameters(1))
    assert [s.name.removeprefix("model.layers.0.mlp.") for s in (first, second, down)] == [
        "gate_up_proj.weight",
        "gate_up_proj.weight",
        "down_proj.weight",
    ]
    fused = torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
    assert fused.shape == (2 * SHAPE.ffn, SHAPE.hidden)
    back = torch.full_like(fused, math.nan)
    gates = []
    for rank in range(size):
        parameters = megatron_parameters(size)
        for local in local_slices(parameters, glm, shard=Shard(rank, size)):
            if local.name == first.name:
                local.load(fused.narrow(local.dim, local.start, local.length))
                back.narrow(local.dim, local.start, local.length).copy_(local.value())
        gates.append(parameters["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)[0])
    assert torch.equal(back, fused) and torch.equal(torch.cat(gates), fused[: SHAPE.ffn])


EXPERTS = replace(SHAPE, family=FAMILIES["qwen3_moe"], experts=Experts(4, 2, 6, True, 10))


def expert_parameters(size: int, expert_size: int, grouped: bool) -> dict[str, torch.Tensor]:
    """One rank's parameters of a layer's feed-forward part, as Megatron's SequentialMLP or Transformer
    Engine's grouped products name them."""
    e, hidden = EXPERTS.experts, EXPERTS.hidden
    local, parts = e.count // expert_size, size if expert_size == 1 else 1
    name = "linear_fc{}.weight{}" if grouped else "local_experts.{1}.linear_fc{0}.weight"
    shapes = {
        "router.weight": (e.count, hidden),
        "shared_experts.gate_weight": (1, hidden),
        "shared_experts.linear_fc1.weight": (2 * e.shared_width // size, hidden),
        "shared_experts.linear_fc2.weight": (hidden, e.shared_width // size),
        **{f"experts.{name.format(1, n)}": (2 * e.width // parts, hidden) for n in range(local)},
        **{f"experts.{name.format(2, n)}": (hidden, e.width // parts) for n in range(local)},
    }
    return {f"decoder.layers.0.mlp.{name}": torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
@pytest.mark.parametrize(("size", "expert_size"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_experts_are_bit_exact_there_and_back(size: int, expert_size: int, grouped: bool) -> None:
    """Whole experts on expert-parallel ranks, or parts of each on tensor-parallel ranks: every element of
    router, experts and shared expert is in one place, under the names of a Hugging Face directory."""

    def slices_of(rank: int, parameters: dict[str, torch.Tensor]) -> list[LocalSlice]:
        shard = Shard(rank % size, size, rank % expert_size, expert_size)
        return local_slices(parameters, EXPERTS, shard=shard)

    generator = torch.Generator().manual_seed(0)
    whole = {
        s.name: torch.randn(s.shape, generator=generator)
        for s in local_slices(expert_parameters(1, 1, grouped), EXPERTS)
    }
    assert len(whole) == 1 + 4 * 3 + 4 and whole["model.layers.0.mlp.experts.3.down_proj.weight"].shape == (
        24,
        6,
    )
    ranks = [expert_parameters(size, expert_size, grouped) for _ in range(max(size, expert_size))]
    back = {name: torch.full_like(t, math.nan) for name, t in whole.items()}
    for rank, parameters in enumerate(ranks):
        for s in slices_of(rank, parameters):
            s.load(whole[s.name].narrow(s.dim, s.start, s.length))
            back[s.name].narrow(s.dim, s.start, s.length).copy_(s.value())
    assert all(torch.equal(back[name], whole[name]) for name in whole)
