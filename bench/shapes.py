"""Models of known shapes with random weights, so that nothing is downloaded: for benches and checks.

The tokenizer is the example's; its ids are the first of the vocabulary. On a GPU the weights are drawn there.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import common
import torch

from laminar_hpc.config.models import WEIGHTS_FILE, known_models
from laminar_hpc.weights.manifest import layout, safetensors_header

EXAMPLE = common.ROOT / "examples" / "arithmetic" / "base"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
CHUNK = 1 << 26  # elements drawn at once
_FEW = "-few-tokens"
_TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
_MORE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def shape(name: str, layers: int | None = None) -> dict:
    """The config.json of `tiny`, `0.5b` or `7b`, with fewer layers if told so. `tiny` ends a response after
    512 tokens on average, the others hardly ever: the end is one token of all. NAME-few-tokens ends them
    after 128, so that few are long."""
    known, base = known_models(), name.removesuffix(_FEW)
    found = {
        "tiny": {**known["Qwen2.5-0.5B"], **_TINY},
        "0.5b": known["Qwen2.5-0.5B"],
        "7b": known["Qwen2.5-7B"],
    }[base]
    found = found if name == base else {**found, "vocab_size": 128}
    return {**found, **_MORE, **({"num_hidden_layers": layers} if layers else {})}


def tensors(model: dict) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each tensor of a Qwen2 directory."""
    hidden, ffn, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    kv = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    outer = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not model["tie_word_embeddings"]:
        outer["lm_head.weight"] = (vocab, hidden)
    of_layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, size in outer.items():
        yield name, size, "bfloat16"
    for layer in range(model["num_hidden_layers"]):
        for part, size in of_layer.items():
            yield f"model.layers.{layer}.{part}", size, "bfloat16"


def make_directory(folder: Path, model: dict) -> Path:
    """config.json and tokenizer, without weights: enough for an engine with load-format=dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    for name in TOKENIZER_FILES:
        shutil.copy(EXAMPLE / name, folder / name)
    return folder


def make_model(folder: Path, model: dict) -> Path:
    """A whole Hugging Face directory. One that is there is kept."""
    if (folder / WEIGHTS_FILE).is_file():
        return folder
    make_directory(folder, model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    manifest, partial = layout(tensors(model), 0, 0), folder / f"{WEIGHTS_FILE}.partial"
    with open(partial, "wb") as file:
        file.write(safetensors_header(manifest))
        for entry in manifest.tensors:
            items = entry.nbytes // 2
            for first in range(0, items, CHUNK):
                count = min(CHUNK, items - first)
                values = torch.randn(count, device=device).mul_(0.02)
                values = torch.ones_like(values) if "norm" in entry.name else values
                file.write(values.to(torch.bfloat16).view(torch.uint8).cpu().numpy().data)
    partial.replace(folder / WEIGHTS_FILE)
    return folder
