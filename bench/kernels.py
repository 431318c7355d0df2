"""The kernels on a GPU: pack and delta encode, and those of layers (layer_rows.py), against a plain copy,
torch eager and torch.compile.

    python bench/kernels.py --json kernels.json     layers of Qwen2.5-7B's shape, 10 repeats
    python bench/kernels.py --layers 4 --repeats 30
    python bench/kernels.py --device cpu              a narrow layer through plain torch, to try it

`make bench-gpu` does the same as the first.

Rates are bytes that must move (read once, written once) per second: of a delta two images, read, and the
changed elements, written. The copy is torch's, on the device, of as many bytes, measured beside each kernel.
Eager and compiled torch do the same work on the same tensors: reorder, cast and sums; or compare and nonzero;
or an indexed copy. All take turns; times are medians of the repeats.

Figures: `pack_over_copy` and `delta_over_copy`, the lowest of the rows that count: goal 0.85.
`pack_over_compile` and `delta_over_compile`: goal 1.5. `layers_over_copy`: the lowest of their rows. What is
compared is first checked to give the same bits.
"""

import argparse
import sys
from dataclasses import replace

import common
import torch
from kernel_timing import compiled_by, row
from layer_rows import layer_rows

from laminar_hpc.weights import kernels
from laminar_hpc.weights.hf import FAMILIES, ModelShape
from laminar_hpc.weights.kernels import reference
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.mapping import local_slices

SHAPE = ModelShape(
    family=FAMILIES["qwen2"],
    layers=4,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18944,
    vocab=152064,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=False,
    max_positions=4096,
)
NARROW = replace(SHAPE, layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512)
CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float32),
]
CHANGED = (1e-4, 0.01, 0.1, 1.0)  # shares; about 0.01 of a bf16 image changes in one step of RL
COUNTED = 0.01  # up to this share a delta must reach the goal
COLUMNS = (
    "kernel",
    "case",
    "MB",
    "ms",
    "GB/s",
    "copy GB/s",
    "over copy",
    "eager ms",
    "compile ms",
    "over eager",
    "over compile",
)


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=10)
    options.add_argument(
        "--layers", type=int, default=SHAPE.layers, help=f"default {SHAPE.layers}, without embeddings"
    )
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    options = options.parse_args()
    options.shape = replace(SHAPE, layers=options.layers) if options.device == "cuda" else NARROW
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "bench/kernels.py needs an NVIDIA GPU, and torch sees none here; run it on a machine that has "
            "one, or with --device cpu"
        )
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # a program for each kind of slice
    rows = [pack_row(options, *cast) for cast in CASTS]
    deltas = [delta_row(options, share) for share in CHANGED]
    of_layers = layer_rows(options)
    counted = [delta for share, delta in zip(CHANGED, deltas, strict=True) if share <= COUNTED]
    figures = {
        "pack_over_copy": min(row["over copy"] for row in rows),
        "pack_over_compile": min(row["over compile"] for row in rows),
        "delta_over_copy": min(row["over copy"] for row in counted),
        "delta_over_compile": min(row["over compile"] for row in counted),
        "layers_over_copy": min(row["over copy"] for row in of_layers),
    }
    common.finish(options, figures, [*rows, *deltas, *of_layers], COLUMNS)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    print(f"GPU {name}; goals: over_copy 0.85, over_compile 1.5")


# ---- the work ----------------------------------------------------------------------------------------------


def parameters(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Decoder layers as Megatron has them at tensor parallel 1."""
    s, found = options.shape, {}
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    for i in range(s.layers):
        prefix = f"decoder.layers.{i}."
        for name, shape in {
            "input_layernorm.weight": (s.hidden,),
            "self_attention.linear_qkv.weight": (qkv, s.hidden),
            "self_attention.linear_qkv.bias": (qkv,),
            "self_attention.linear_proj.weight": (s.hidden, s.heads * s.head_dim),
            "pre_mlp_layernorm.weight": (s.hidden,),
            "mlp.linear_fc1.weight": (2 * s.ffn, s.hidden),
            "mlp.linear_fc2.weight": (s.hidden, s.ffn),
        }.items():
            found[prefix + name] = torch.randn(shape, device=options.device, dtype=dtype)
    return found


def words_sums(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums of a flat image of whole words, as torch would take them on the device."""
    words = image.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return words.sum(), (words * torch.arange(1, len(words) + 1, device=words.device)).sum()


def pack_in_torch(
    own: list[LocalSlice], targets: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    for part, target in zip(own, targets, strict=True):
        reference.pack(part, target)
    return [words_sums(target.view(-1)) for target in targets]


def one_piece(view: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch.compile gets, slice by slice."""
    target.view(view.shape).copy_(view)
    return words_sums(target.view(-1))


def delta_in_torch(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    changed = torch.nonzero(reference.bits(new) != reference.bits(old)).view(-1)
    return changed.to(torch.int32), new[changed]


def pack_row(options: argparse.Namespace, source: torch.dtype, serving: torch.dtype) -> dict[str, object]:
    own = local_slices(parameters(options, source), options.shape)
    plan = layout([(p.name, p.shape, serving) for p in own], 0, 0)
    buckets = [torch.zeros(plan.data_bytes, dtype=torch.uint8, device=options.device) for _ in range(3)]
    ours, eager, compiled_into = (
        [kernels.place(b, t.offset, t.shape, serving) for t in plan.tensors] for b in buckets
    )
    compiled = compiled_by(options, one_piece, dynamic=False)
    sums = kernels.pack(own, ours)()
    expected = pack_in_torch(own, eager)
    for local, target in zip(own, compiled_into, strict=True):
        compiled(local.view, target)
    if not torch.equal(buckets[0], buckets[1]) or sums != [
        tuple(int(x) % 2**64 for x in both) for both in expected
    ]:
        sys.exit(f"pack {source} -> {serving}: the kernel's bytes or sums are not the reference's")
    works = {
        "ours": lambda: kernels.pack(own, ours),
        "eager": lambda: pack_in_torch(own, eager),
        "compile": lambda: [compiled(p.view, t) for p, t in zip(own, compiled_into, strict=True)],
    }
    moved = sum(p.view.numel() * p.view.element_size() for p in own) + plan.data_bytes
    return row("pack", f"{name_of(source)} -> {name_of(serving)}", moved, options, works)


def delta_row(options: argparse.Namespace, share: float) -> dict[str, object]:
    """Encoding of a bf16 image as large as the packed layers; its application gives the new image's bits."""
    count = sum(p.view.numel() for p in local_slices(parameters(options, torch.bfloat16), options.shape))
    old = torch.randn(count, device=options.device, dtype=torch.bfloat16)
    new = torch.where(torch.rand(count, device=options.device) < share, -2 * old, old)
    image = old.clone()
    delta, (indices, values) = kernels.delta_encode(new, old), delta_in_torch(new, old)
    image[delta.indices.long()] = delta.values
    same = torch.equal(delta.indices, indices) and torch.equal(
        reference.bits(delta.values), reference.bits(values)
    )
    if not same or not torch.equal(reference.bits(image), reference.bits(new)):
        sys.exit(f"delta of {share:g}: the kernel's indices, values or image are not the reference's")
    encode = compiled_by(options, delta_in_torch)
    encoding = {
        "ours": lambda: kernels.delta_encode(new, old),
        "eager": lambda: delta_in_torch(new, old),
        "compile": lambda: encode(new, old),
    }
    return row(
        "delta encode", f"{share:g} changed", new.nbytes + old.nbytes + delta.nbytes, options, encoding
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
