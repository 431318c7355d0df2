"""Hugging Face model directories: what config.json says, tensors read one by one, and a directory written
back whole.

Used by the trainer's Megatron adapter. A new model family is one row of config/families.py, and its tensors'
rows in mapping.py. Needs no transformers.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.experts import Experts, experts_of, objection
from laminar_hpc.config.families import FAMILIES, Family, has_qkv_bias, is_tied
from laminar_hpc.config.models import INDEX_FILE, SIDE_FILES, WEIGHTS_FILE, head_size
from laminar_hpc.config.rope import RopeScaling, positions, rope_entries, scaling_of
from laminar_hpc.config.windows import Windows, windows_of
from laminar_hpc.weights.manifest import layout, safetensors_header

if TYPE_CHECKING:  # a command line reads a shape, and does not wait for it
    import torch


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a model, from its config.json."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    norm_eps: float
    tied: bool
    max_positions: int
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None
    windows: Windows | None = None
    qkv_bias: bool = False
    attention_scale: float | None = None  # of products of queries and keys; None: 1 / sqrt(head_dim)
    rotary_dims: int | None = None  # of a head, the first so many that RoPE turns; None: all


def _objection(c: dict, rope: dict) -> str:
    """What the trainer cannot compute of a config.json, in a sentence; "" if there is nothing."""
    activation = FAMILIES[c["model_type"]].activation
    softcap = c.get("attn_logit_softcapping") or c.get("final_logit_softcapping")
    if own := [name for name in c.get("auto_map") or () if name.startswith("AutoModel")]:
        wrong = f"auto_map names code of the model's own ({own[0]}), which neither trainer nor engine runs"
        wrong += "; take auto_map out if the model is a plain one without it"
    elif c.get("pretraining_tp", 1) != 1:
        wrong = f"pretraining_tp={c['pretraining_tp']} splits each sum as the pretraining did, which the "
        wrong += "trainer does not; set it to 1, which differs by rounding only"
    elif softcap or c.get("use_bidirectional_attention"):
        wrong = "soft caps of logits and attention to later tokens are not supported; use another model"
    elif c.get("dual_chunk_attention_config") and c["model_type"] != "qwen2":
        wrong = "attention by chunks is supported with qwen2 only; take dual_chunk_attention_config out, "
        wrong += "without which attention is the same up to chunk_size tokens"
    elif c.get("quantization_config"):
        wrong = "quantized weights cannot be trained; name the model without them"
    elif (
        c.get("use_sliding_window")
        or (c["model_type"] == "mixtral" and c.get("sliding_window"))
        or c.get("hidden_act", activation) != activation
        or c.get("hidden_activation", activation) != activation
        or c.get("attention_dropout")
    ):
        wrong = f"sliding windows, dropout and activations other than {activation} are not supported"
        wrong += "; use another model"
    # Qwen2 has no such key, and its own biases
    elif (c.get("attention_bias") and c["model_type"] not in ("qwen2", "glm4")) or c.get("mlp_bias"):
        wrong = "attention_bias and mlp_bias are not supported; use a model without them"
    elif (part := rope["partial_rotary_factor"]) != 1.0 and not FAMILIES[c["model_type"]].interleaved:
        wrong = f"partial_rotary_factor={part} is not supported; use a model whose RoPE turns whole heads"
    elif part != c.get("partial_rotary_factor", part) or int(part * head_size(c)) % 2:
        wrong = f"partial_rotary_factor={part} is not what config.json says of it elsewhere, or of no even "
        wrong += "number of dimensions; download the model again"
    elif c["model_type"] == "qwen2_moe" and not c.get("qkv_bias", True):
        wrong = "qkv_bias=false is not supported with qwen2_moe; use a model with these biases"
    else:
        wrong = objection(c)
    return wrong


def read_shape(directory: str | Path) -> ModelShape:
    """Raises LaminarError when there is no config.json, or for what the trainer cannot compute: other
    families, scalings of RoPE that depend on the longest sequence, other biases."""
    file = Path(directory) / "config.json"
    try:
        c = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LaminarError(
            f"{file} cannot be read ({error}); name a Hugging Face model directory in model.path"
        ) from None
    if c.get("model_type") not in FAMILIES:
        raise LaminarError(
            f"{file}: model_type {c.get('model_type')} is not supported; supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    rope = rope_entries(c)
    share = c.get("partial_rotary_factor") or FAMILIES[c["model_type"]].rotated
    rope.setdefault("partial_rotary_factor", share)
    if wrong := _objection(c, rope):
        raise LaminarError(f"{file}: {wrong}")
    try:
        scaling = scaling_of(c)
    except ValueError as error:
        raise LaminarError(f"{file}: {error}") from None
    family, heads = FAMILIES[c["model_type"]], c["num_attention_heads"]
    if scaling is not None and not family.scaled_rope:
        plain = f"SGLang's {family.architecture} is for plain RoPE, and config.json scales it"
        raise LaminarError(f"{file}: {plain}; use another model")
    return ModelShape(
        family=family,
        layers=c["num_hidden_layers"],
        hidden=c["hidden_size"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_size(c),
        ffn=c["intermediate_size"],
        vocab=c["vocab_size"],
        rope_theta=float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
        norm_eps=c.get("rms_norm_eps", 1e-6),
        tied=is_tied(c),
        max_positions=positions(c) or 32768,
        rope_scaling=scaling,
        experts=experts_of(c),
        windows=windows_of(c),
        qkv_bias=has_qkv_bias(c),
        attention_scale=c.get("query_pre_attn_scalar", 256) ** -0.5 if family.centered_norms else None,
        rotary_dims=int(head_size(c) * rope["partial_rotary_factor"]),
    )


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise LaminarError(f"{file} is damaged or cut off ({error}); download the model again") from None


class TensorReader:
    """The tensors of a directory, read when asked for. A context manager; the files stay open inside it."""

    def __init__(self, directory: str | Path, file: str = WEIGHTS_FILE) -> None:
        """`file`: where the tensors are if the directory has no index. Raises LaminarError when the directory
        holds no safetensors file, or not all that its index names."""
        self._directory = Path(directory)
        self._stack = ExitStack()
        index = self._directory / INDEX_FILE
        named = json.loads(index.read_text())["weight_map"].values() if index.exists() else [file]
        names = sorted(set(named))
        missing = [n for n in names if not (self._directory / n).is_file()]
        if missing:
            raise LaminarError(
                f"{self._directory}: {', '.join(missing)} is missing; the model must be there as "
                "safetensors, download it again"
            )
        files = [self._stack.enter_context(_open(self._directory / n)) for n in names]
        # safe_open is no dict
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def narrow(self, name: str, dim: int, start: int, length: int) -> "torch.Tensor":
        """Elements [start, start + length) of dimension `dim` (0 or 1); only these are read."""
        part = self._file_of[name].get_slice(name)
        return part[start : start + length] if dim == 0 else part[:, start : start + length]


def copy_side_files(source: str | Path, target: Path, dtype: "torch.dtype") -> None:
    """Everything of a model directory but its weights: config.json (with its dtype set to `dtype`) and the
    tokenizer's files."""
    for name in SIDE_FILES:
        if (Path(source) / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source) / name, target / name)
    config = json.loads((target / "config.json").read_text())
    for key in {"dtype", "torch_dtype"} & set(config):  # transformers 5 | 4
        config[key] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def safetensors_parts(tensors: "Sequence[tuple[str, torch.Tensor]]") -> Iterator[bytes | memoryview]:
    """A safetensors file, part by part: safetensors' own writer would hold all bytes a second time. `tensors`
    in host memory, contiguous."""
    import torch

    yield safetensors_header(layout(((name, t.shape, t.dtype) for name, t in tensors), 0, 0))
    for _, tensor in tensors:
        yield tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_index(target: Path, file_of: dict[str, str], total_bytes: int) -> None:
    """What a directory needs beside several files: in which of them each tensor is."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
