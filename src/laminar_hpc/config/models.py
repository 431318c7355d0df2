"""A model's architecture numbers: from its config.json, or for a dry run from the table of public models below. Imports no torch.

The table lets `dry_run=true` count bytes before anything was downloaded; a real run always reads the directory itself.
"""

import json
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import TrainerConfig

# layers, hidden, heads, KV heads, FFN, vocabulary, tied embeddings, positions: as in the config.json of Qwen/<name> on Hugging Face.
_QWEN2 = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 4864, 151936, True, 32768),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, 151936, True, 131072),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944, 152064, False, 131072),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064, False, 131072),
    "Qwen2.5-72B": (80, 8192, 64, 8, 29568, 152064, False, 131072),
}
_KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip


def known_models() -> dict[str, dict]:
    """Directory name -> what its config.json says of the architecture."""
    common = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {name: {**common, **dict(zip(_KEYS, numbers, strict=True))} for name, numbers in _QWEN2.items()}


def model_config(path: str, dry_run: bool = False) -> dict:
    """The model's config.json; with `dry_run` the table's entry where the directory is not there. Raises LaminarError for neither."""
    file = Path(path) / "config.json"
    if not path or not file.exists():
        if dry_run and Path(path).name in known_models():
            return known_models()[Path(path).name]
        raise LaminarError(f"model.path={path or '(empty)'}: {_cure(Path(path))}")
    try:
        return json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LaminarError(f"{file} is not JSON ({error}); download the model again") from None


def _cure(path: Path) -> str:
    """What is wrong with the path, and what the user probably meant."""
    if not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists():
        return "it is not on this machine yet; a run downloads it from the Hugging Face hub"
    return "no config.json there; " + _meant(path)


def _meant(path: Path) -> str:
    if (path / "hf" / "config.json").is_file():
        return f"this is a checkpoint of ours, its Hugging Face directory is model.path={path / 'hf'}"
    if not path.is_absolute() and len(path.parts) == 2 and not path.exists():
        return (
            f"as there is a folder {path.parent}/ here, it was taken for a path; for the model of the hub: "
            f"hf download {path} --local-dir models/{path.name}"
        )
    return "name a Hugging Face model directory, or a model of the hub, e.g. model.path=Qwen/Qwen2.5-0.5B"


def _head(model: dict) -> int:
    return model.get("head_dim") or (128 if model.get("model_type") == "qwen3" else model["hidden_size"] // model["num_attention_heads"])


def _kv_heads(model: dict) -> int:
    return model.get("num_key_value_heads") or model["num_attention_heads"]


def count_parameters(model: dict) -> int:
    """Parameters of a Llama, Qwen2 or Qwen3 model, from its config.json."""
    hidden, layers, vocab, family = model["hidden_size"], model["num_hidden_layers"], model["vocab_size"], model.get("model_type", "qwen2")
    q, kv = model["num_attention_heads"] * _head(model), _kv_heads(model) * _head(model)
    biases, norms = q + 2 * kv if family == "qwen2" else 0, 2 * _head(model) if family == "qwen3" else 0
    layer = 2 * hidden * (q + kv) + biases + norms + 3 * hidden * model["intermediate_size"] + 2 * hidden
    return vocab * hidden * (1 if model.get("tie_word_embeddings") else 2) + layers * layer + hidden


def kv_bytes_per_token(model: dict, bytes_per_value: int) -> int:
    """KV cache of one token over all layers: keys and values."""
    return 2 * model["num_hidden_layers"] * _kv_heads(model) * _head(model) * bytes_per_value


def trainer_bytes(model: dict, bytes_per_value: int, trainer: TrainerConfig) -> int:
    """Estimated bytes on the fullest trainer rank: the state, and what micro-batches of `tokens_per_microbatch` tokens leave behind.

    State per parameter: itself, a float32 gradient, Adam's two float32 moments and a float32 copy of what is not float32; the last three
    over the data-parallel ranks with the distributed optimizer. Activations per token and layer: five values of the hidden size that every
    tensor-parallel rank holds whole (inputs and outputs of the two norms, the residual), and what is split: queries, keys, values,
    attention's output, and four of the feed-forward size. With recomputation only a layer's input stays, and one layer is whole. The
    first of p pipeline stages keeps p micro-batches; the last has logits and their gradient in float32.
    """
    tensor, pipeline = trainer.tensor_parallel, trainer.pipeline_parallel
    optimizer = (8 if bytes_per_value == 4 else 12) / (trainer.data_parallel if trainer.distributed_optimizer else 1)
    state = count_parameters(model) / (tensor * pipeline) * (bytes_per_value + 4 + optimizer)
    hidden, tokens = model["hidden_size"], trainer.tokens_per_microbatch
    split = 2 * hidden + 2 * _kv_heads(model) * _head(model) + 4 * model["intermediate_size"]
    layer = tokens * bytes_per_value * (5 * hidden + split / tensor)
    layers = model["num_hidden_layers"]  # of a stage, times the micro-batches that it keeps: the pipeline cancels out
    kept = layers * tokens * bytes_per_value * hidden + layer if trainer.recompute_activations else layers * layer
    logits = 2 * 4 * tokens * model["vocab_size"] / tensor
    return int(state + max(kept, kept / pipeline + logits))


def rollout_bytes(model: dict, bytes_per_value: int, tensor: int, kv_tokens: int) -> int:
    """Estimated bytes on each GPU of an engine: its shard of weights and KV cache; KV heads are copied beyond one per rank."""
    weights = count_parameters(model) * bytes_per_value / tensor
    return int(weights + kv_bytes_per_token(model, bytes_per_value) * kv_tokens / min(tensor, _kv_heads(model)))
