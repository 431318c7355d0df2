"""Run by test_kernels.py under TRITON_INTERPRET=1: each Triton kernel against its plain-torch reference, bit
by bit."""

import math

import pytest
import torch

from laminar_hpc.weights.hf import FAMILIES, ModelShape
from laminar_hpc.weights.kernels import (
    logprobs,
    pack,
    place,
    reference,
    triton_delta,
    triton_logprobs,
    triton_pack,
)
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import add_sums, tensor_sums
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.mapping import Shard, local_slices

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASTS = [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)]
# heads, key-value heads, head dimension, hidden, ffn, vocabulary, tied; multi-head, grouped 2, 3 and 7,
# multi-query; some sizes odd
MODELS = {
    "mha-odd": (4, 4, 3, 7, 10, 33, False),
    "gqa2": (8, 4, 6, 24, 20, 50, False),
    "gqa3-odd-tied": (12, 4, 5, 15, 12, 61, True),
    "gqa7-tied": (28, 4, 4, 22, 36, 97, True),
    "gqa8": (32, 4, 2, 64, 28, 64, False),
}


def model_shape(name: str) -> ModelShape:
    heads, kv, dim, hidden, ffn, vocab, tied = MODELS[name]
    return ModelShape(
        family=FAMILIES["qwen2"],
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        ffn=ffn,
        vocab=vocab,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=tied,
        max_positions=64,
    )


def shard_pieces(s: ModelShape, rank: int, size: int, dtype: torch.dtype) -> list[LocalSlice]:
    """What a shard of Megatron's holds, its vocabulary padded to a multiple of 32 per shard; the tied
    embedding's copy too."""
    generator, vocab = torch.Generator().manual_seed(rank), math.ceil(s.vocab / 32 / size) * 32
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim // size
    layer = "decoder.layers.0."
    shapes = {
        "embedding.word_embeddings.weight": (vocab, s.hidden),
        layer + "input_layernorm.weight": (s.hidden,),
        layer + "self_attention.linear_qkv.weight": (qkv, s.hidden),
        layer + "self_attention.linear_qkv.bias": (qkv,),
        layer + "self_attention.linear_proj.weight": (s.hidden, s.heads * s.head_dim // size),
        layer + "mlp.linear_fc1.weight": (2 * s.ffn // size, s.hidden),
        layer + "mlp.linear_fc2.weight": (s.hidden, s.ffn // size),
        "output_layer.weight": (vocab, s.hidden),
    }
    parameters = {n: torch.randn(x, generator=generator).to(dtype) for n, x in shapes.items()}
    if s.tied:
        parameters["output_layer.weight"] = parameters["embedding.word_embeddings.weight"].clone()
    return local_slices(parameters, s, shard=Shard(rank, size))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(reference.bits(a.contiguous().view(-1)), reference.bits(b.contiguous().view(-1)))


def unsigned(sums: torch.Tensor) -> list[tuple[int, int]]:
    return [(a % 2**64, b % 2**64) for a, b in sums.tolist()]


# Every model split in two, the odd ones whole and in four, every cast at shapes with odd and with even rows.
# Which 16-bit format a size has makes no difference to where rows begin and end.
SOME = [(n, 2, F32, F16) for n in MODELS]
SOME += [("mha-odd", 1, F32, BF16), ("gqa3-odd-tied", 4, F32, BF16)]
SOME += [("mha-odd", 2, F32, F32), ("gqa7-tied", 2, F16, F16), ("gqa2", 2, BF16, BF16)]
# The others at every size, and with the casts of the others.
MORE = [(n, size, F32, BF16) for n in MODELS for size in (1, 4) if (n, size, F32, BF16) not in SOME]
MORE += [("mha-odd", 2, F16, F16), ("gqa7-tied", 2, F32, F32), ("gqa3-odd-tied", 4, BF16, BF16)]
COMBINATIONS = [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@pytest.mark.parametrize(("name", "size", "source", "serving"), COMBINATIONS)
def test_pack_whole_tensors(name: str, size: int, source: torch.dtype, serving: torch.dtype) -> None:
    """All shards into the places of the whole tensors in one bucket: the reference's bytes, and sums that add
    up to the tensors' own."""
    shape = model_shape(name)
    shards = [shard_pieces(shape, rank, size, source) for rank in range(size)]
    plan = layout({p.name: (p.name, p.shape, serving) for p in shards[0]}.values(), 0, 0)
    entries = {entry.name: entry for entry in plan.tensors}
    found, expected = (torch.full((plan.data_bytes,), 0x5A, dtype=torch.uint8) for _ in range(2))
    parts: dict[str, dict[tuple[int, int], tuple[int, int]]] = {name: {} for name in entries}

    def targets(bucket: torch.Tensor, own: list[LocalSlice]) -> list[torch.Tensor]:
        return [
            place(bucket, entries[p.name].offset, p.shape, serving).narrow(p.dim, p.start, p.length)
            for p in own
        ]

    for own in shards:
        sums = unsigned(triton_pack.pack(own, targets(found, own)))
        assert sums == pack(own, targets(expected, own))()
        for local, both in zip(own, sums, strict=True):
            parts[local.name][local.start, local.length] = (
                both  # a copy of a tied embedding, or of a norm, once
            )
    assert torch.equal(found, expected)
    for entry in plan.tensors:
        whole = found[entry.offset : entry.offset + entry.nbytes]
        assert add_sums(parts[entry.name].values()) == tensor_sums(whole), entry.name


@pytest.mark.parametrize(("source", "serving"), CASTS, ids=str)
@pytest.mark.parametrize("name", ["mha-odd", "gqa7-tied"])
def test_pack_slices_next_to_each_other(name: str, source: torch.dtype, serving: torch.dtype) -> None:
    """What a rank sends: its slices without gaps; sums as of their places in the whole tensors. Bytes beside
    them stay as they were."""
    own, begin, offsets = shard_pieces(model_shape(name), 1, 2, source), 4, []
    for local in own:
        offsets.append(begin)
        begin += math.prod(local.slice_shape) * serving.itemsize
    found, expected = (torch.full((begin + 8,), 0x5A, dtype=torch.uint8) for _ in range(2))
    into = [
        [place(bucket, o, p.slice_shape, serving) for o, p in zip(offsets, own, strict=True)]
        for bucket in (found, expected)
    ]
    assert unsigned(triton_pack.pack(own, into[0])) == pack(own, into[1])()
    assert torch.equal(found, expected) and (found[:4] == 0x5A).all() and (found[-8:] == 0x5A).all()


@pytest.mark.parametrize("serving", [BF16, F16])
@pytest.mark.parametrize("length", [8192, 8191])
def test_every_kind_of_rounding(serving: torch.dtype, length: int) -> None:
    """Ties to even both ways, carries into the exponent, overflow to infinity, subnormals, signed zeros; a
    NaN stays one. Both paths."""
    exponents = torch.arange(256, dtype=torch.int32).repeat_interleave(32) << 23
    edges = [
        0,
        1,
        0xFFF,
        0x1000,
        0x1001,
        0x2FFF,
        0x3000,
        0x7FFF,
        0x8000,
        0x8001,
        0xFFFF,
        0x17FFF,
        0x18000,
        0x18001,
        0x7F8000,
        0x7FFFFF,
    ]
    mantissas = torch.tensor(edges, dtype=torch.int32)
    signs = torch.tensor([0, -(2**31)], dtype=torch.int32).repeat_interleave(16)
    values = (exponents | mantissas.repeat(2).repeat(256) | signs.repeat(256)).view(F32)[:length]
    local = LocalSlice("x", (length,), 0, 0, length, values)
    found, expected = torch.empty(length, dtype=serving), torch.empty(length, dtype=serving)
    sums = unsigned(triton_pack.pack([local], [found]))
    reference.pack(local, expected)
    number = ~values.isnan()
    assert same_bits(found[number], expected[number]) and found[~number].isnan().all() and (~number).any()
    assert sums == reference.sums(local, found)()


@pytest.mark.parametrize("programs", [1, 512])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5200), (5, 1030), (1, 1)])
def test_pack_more_than_one_tile(
    rows: int, columns: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tiles per program and one, several programs per slice, ends inside a tile."""
    monkeypatch.setattr(triton_pack, "PROGRAMS", programs)
    monkeypatch.setattr(triton_pack, "TILES", 4)
    triton_pack._launches.clear()
    for source, serving in CASTS:
        view = torch.randn(rows, columns + 7).to(source)[:, :columns]
        for start, total in ((0, columns), (5, columns + 9)):
            local = LocalSlice("x", (rows, total), 1, start, columns, view)
            found, expected = (torch.zeros(rows, total, dtype=serving) for _ in range(2))
            sums = unsigned(triton_pack.pack([local], [found.narrow(1, start, columns)]))
            reference.pack(local, expected.narrow(1, start, columns))
            assert same_bits(found, expected) and sums == [tensor_sums(expected)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.2, 1.0])
@pytest.mark.parametrize("length", [1, 31, 8192, 8195, 17_010])
def test_delta(length: int, share: float, dtype: torch.dtype) -> None:
    """Empty, sparse and full deltas: the reference's indices and values, in its order; applied, the new
    image's bits."""
    old = torch.randn(length).to(dtype)
    changed = torch.rand(length) < share
    new = torch.where(changed, -2 * old, old)
    if length > 31 and share:
        old[7], new[7], old[9], new[9] = 0.0, -0.0, math.nan, math.nan  # differs; does not
    found, expected = triton_delta.encode(new, old), reference.delta_encode(new, old)
    assert torch.equal(found.indices, expected.indices) and same_bits(found.values, expected.values)
    assert (
        found.indices.numel() == int((reference.bits(new) != reference.bits(old)).sum())
        and found.indices.dtype == torch.int32
    )
    image = old.clone()
    image[found.indices.long()] = found.values
    assert same_bits(image, new)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_bit_of_a_word_of_marks(dtype: torch.dtype) -> None:
    """One changed element alone in its word, at each place of two neighbouring words."""
    old = torch.zeros(64 * 64 + 6, dtype=dtype)
    new, places = old.clone(), [64 * at + at for at in range(64)]
    new[places] = 1.0
    assert triton_delta.encode(new, old).indices.tolist() == places
    new[places[1:]] = 0.0
    assert triton_delta.encode(new, old).indices.tolist() == [0]


def test_delta_of_nothing() -> None:
    """An image without elements."""
    empty = torch.empty(0, dtype=BF16)
    found = triton_delta.encode(empty, empty)
    assert found.indices.numel() == found.values.numel() == 0


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("rows", "columns", "real"), [(5, 1000, 1000), (3, 1024, 900), (2, 64, 0), (0, 64, 64)]
)
def test_logprobs(
    rows: int,
    columns: int,
    real: int,
    temperature: float,
    with_entropy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of several blocks, padding, a rank that has only padding, places of other ranks: the reference's
    values and gradients to the order of sums, in place too."""
    for launch in ("SUMMARY", "GRADIENT"):
        monkeypatch.setattr(triton_logprobs, launch, {"BLOCK": 256})
    logits, upstream = 8 * torch.randn(rows, columns), torch.randn(rows)
    places = torch.randint(-1, max(1, real), (rows,)).clamp(max=real - 1)
    found = triton_logprobs.summary(logits, places, real, temperature)
    expected = logprobs.summary(logits, places, real, temperature)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-5)
    normalizers = expected[0] + (expected[1] + (real == 0)).log()
    entropies = (normalizers - expected[0]) - expected[2] / (expected[1] + (real == 0))
    slope = torch.randn(rows)
    entropy = logprobs.EntropySlope(entropies, slope) if with_entropy else None
    # log p + H has the rounding of the largest logit, whatever is left of it
    left = (
        2**-22 * float((logits.abs().amax(-1) * slope.abs()).sum()) / temperature**2 if with_entropy else 0.0
    )
    arguments = places, real, temperature, normalizers, upstream, entropy
    ours, theirs = logits.clone(), logits.clone()
    triton_logprobs.gradient(ours, *arguments, ours)
    logprobs.gradient(theirs, *arguments, theirs)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6 + left) and not ours[:, real:].any()
    narrow = torch.full((rows, columns), 7.0, dtype=BF16)
    triton_logprobs.gradient(logits, *arguments, narrow)
    assert torch.allclose(narrow.float(), theirs, rtol=2**-7, atol=1e-6 + left)  # the interpreter truncates
