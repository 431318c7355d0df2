"""A model's architecture numbers: from its config.json, or for a dry run from the table of public models
in conf/simulation/tables. Imports no torch.

The table lets `dry_run=true` count bytes before anything was downloaded; a real run always reads the
directory itself.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.experts import expert_replicas, expert_shards, experts_of, routed_activations
from laminar_hpc.config.families import FAMILIES, family_of, has_qkv_bias, is_tied
from laminar_hpc.config.system_schema import TrainerConfig
from laminar_hpc.config.yaml_text import load_yaml

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SIDE_FILES = (  # of a Hugging Face directory, beside the weights
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json "
    "vocab.json merges.txt chat_template.jinja additional_chat_templates/tool_use.jinja"
).split()
SHAPE = (  # of a config.json: what makes weights fit into a model
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
TRAINED = {kind: family.architecture for kind, family in FAMILIES.items()}  # by model_type


@cache
def _table() -> dict[str, dict]:
    """Name on the hub -> what counts of the config.json."""
    from laminar_hpc.config.directories import conf_directory

    text = (conf_directory() / "simulation" / "tables" / "models.yaml").read_text()
    return {
        path: {"architectures": [TRAINED.get(kind := entry["config"]["model_type"], kind)], **entry["config"]}
        for entry in load_yaml(text).values()
        for path in (entry["path"], *entry.get("also", ()))
    }


def known_models() -> dict[str, dict]:
    """Directory name -> what its config.json says of the architecture."""
    return {Path(name).name: dict(config) for name, config in _table().items()}


def is_known(name: str) -> bool:
    """Whether a model of the hub, OWNER/NAME, is one of `known_models`."""
    return name in _table()


def model_config(path: str, dry_run: bool = False) -> dict:
    """The model's config.json; with `dry_run` the table's entry where the directory is not there. Raises
    LaminarError for neither, and for a file that is no JSON object."""
    file = Path(path) / "config.json"
    if not path or not file.exists():
        if dry_run and Path(path).name in known_models():
            return known_models()[Path(path).name]
        raise LaminarError(f"model.path={path or '(empty)'}: {_cure(Path(path))}")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a model's file; empty where there is no file. Raises LaminarError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also bytes that are no UTF-8
        raise LaminarError(f"{file} cannot be read as JSON ({error}); download the model again") from None
    if not isinstance(found, dict):
        raise LaminarError(f"{file} is no JSON object; download the model again")
    return found


def vocabulary(tokenizer: Path) -> object:
    """What decides on a text's token ids, of a tokenizer.json. Raises LaminarError."""
    content = read_json(tokenizer)
    added = {(each["id"], each["content"]) for each in content.get("added_tokens") or ()}
    return content.get("model"), added


def is_downloaded(path: str) -> bool:
    """Whether it is the name of a model on the hub, OWNER/NAME, which a run downloads, and no path."""
    name = Path(path)
    return not name.is_absolute() and len(name.parts) == 2 and not name.parent.exists()


def _cure(path: Path) -> str:
    """What is wrong with the path, and what the user probably meant."""
    if is_downloaded(str(path)):
        return "it is not on this machine yet; a run downloads it from the Hugging Face hub"
    return "no config.json there; " + _meant(path)


def _meant(path: Path) -> str:
    for folder in (path, path / "hf"):
        if (folder / "adapter_config.json").is_file():
            return f"this is an adapter: name its model here, and the adapter as model.lora.path={folder}"
    if (path / "hf" / "config.json").is_file():
        return f"this is a checkpoint of ours, its Hugging Face directory is model.path={path / 'hf'}"
    if written := sorted(path.glob("checkpoints/step_*/hf")):
        return f"this is a run of ours; the model of its newest checkpoint is model.path={written[-1]}"
    if not path.is_absolute() and len(path.parts) == 2 and not path.exists():
        return (
            f"as there is a folder {path.parent}/ here, it was taken for a path; for the model of the hub: "
            f"hf download {path} --local-dir models/{path.name}"
        )
    return "name a Hugging Face model directory, or a model of the hub, e.g. model.path=Qwen/Qwen2.5-0.5B"


def indexed_files(folder: Path) -> list[str]:
    """The safetensors files that the folder's index names; none without an index. Raises ValueError for a
    file that is none."""
    index = folder / INDEX_FILE
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{index} is no index of safetensors files") from None


def missing_files(path: str) -> list[str]:
    """What a Hugging Face directory lacks for a run, one line each with its cure."""
    folder, lines, named = Path(path), list[str](), list[str]()
    try:
        named = indexed_files(folder)
    except ValueError:
        lines.append(f"model.path={path}: {INDEX_FILE} is no index of safetensors files; download it again")
    again, anew = "download the model again", "save it anew with transformers"
    if gone := [name for name in named if not (folder / name).is_file()]:
        lines.append(f"model.path={path}: {', '.join(gone)} of its index is missing; {again}")
    elif not any(folder.glob("*.safetensors")):
        old = next(iter(sorted(folder.glob("*.bin"))), None)
        convert = f"{anew}: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        cure = f"{old.name} is not read; {convert}" if old else again
        lines.append(f"model.path={path}: no *.safetensors there; {cure}")
    if not (folder / "tokenizer.json").is_file():
        slow = any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json"))
        cure = f"{anew}: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)" if slow else again
        lines.append(f"model.path={path}: no tokenizer.json there; {cure}")
    return lines


def head_size(model: dict) -> int:
    own = model.get("head_dim") or family_of(model).head_dim
    return own or model["hidden_size"] // model["num_attention_heads"]


def serving_bytes(dtype: str) -> int:
    """Bytes of each weight that is served."""
    return 2 if dtype == "bfloat16" else 4


def kv_heads(model: dict) -> int:
    return model.get("num_key_value_heads") or model["num_attention_heads"]


def count_parameters(model: dict) -> int:
    """Parameters of a model of a family that is trained, from its config.json."""
    hidden, layers, vocab = model["hidden_size"], model["num_hidden_layers"], model["vocab_size"]
    family = family_of(model)
    q, kv = model["num_attention_heads"] * head_size(model), kv_heads(model) * head_size(model)
    biases = q + 2 * kv if has_qkv_bias(model) else 0
    norms = 2 * head_size(model) if family.qk_norm else 0
    experts = experts_of(model)
    feed_forward = experts.layer_parameters(hidden) if experts else 3 * hidden * model["intermediate_size"]
    norms += len(family.norms) * hidden
    layer = 2 * hidden * (q + kv) + biases + norms + feed_forward
    return vocab * hidden * (1 if is_tied(model) else 2) + layers * layer + hidden


def even_tokens(model: dict) -> float:
    """The length at which a sequence's causal attention takes as many operations as all else. A token's
    matrix products take 2 per parameter but the embedding's and those of experts that it does not go to, n
    tokens' attention 2 n^2 x heads x head size per layer, half of what it is without the mask; the backward
    pass takes twice both."""
    embedding = 0 if is_tied(model) else model["vocab_size"] * model["hidden_size"]
    width = model["num_attention_heads"] * head_size(model)
    experts = experts_of(model)
    idle = experts.idle_parameters(model["hidden_size"]) if experts else 0
    return (count_parameters(model) - embedding) / (model["num_hidden_layers"] * width) - idle / width


def kv_bytes_per_token(model: dict, bytes_per_value: int) -> int:
    """KV cache of one token over all layers: keys and values."""
    return 2 * model["num_hidden_layers"] * kv_heads(model) * head_size(model) * bytes_per_value


def state_bytes(parameters: float, resident: float, optimizer: float, ranks: int) -> float:
    """Bytes of weights, gradients and optimizer on a trainer GPU that holds `parameters`.

    `resident` bytes of each parameter stay on the GPU; the distributed optimizer divides `optimizer` bytes
    over `ranks` data-parallel ranks (ZeRO stage 1, Rajbhandari et al., arXiv 1910.02054, section 3.1). The
    simulator's layouts use it too.
    """
    return parameters * (resident + optimizer / ranks)


def first_stage_layers(layers: int, stages: int) -> int | None:
    """Layers of the first pipeline stage where the stages cannot all have the same number: the others share
    the rest evenly, and the first has as near to its share as that allows. None where they can. At least one
    layer per stage is needed."""
    if layers % stages == 0:
        return None
    others = range(1, (layers - 1) // (stages - 1) + 1)  # layers of each other stage
    return min(
        (layers - (stages - 1) * n for n in others), key=lambda first: (abs(first - layers / stages), -first)
    )


def stage_layers(model: dict, stages: int) -> tuple[int, int]:
    """Layers of the first pipeline stage and of each other one; 1 where there are fewer than stages."""
    layers = model["num_hidden_layers"]
    if layers < stages:
        return 1, 1
    first = first_stage_layers(layers, stages) or layers // stages
    return first, (layers - first) // max(1, stages - 1)


def _stage_experts(model: dict, stages: int) -> int:
    """Parameters of the fullest pipeline stage that lie in routed experts."""
    experts = experts_of(model)
    layers = max(stage_layers(model, stages))
    return layers * experts.routed_parameters(model["hidden_size"]) if experts else 0


def _stage_parameters(model: dict, stages: int) -> float:
    """Parameters of the fullest pipeline stage: the first has the embedding, the last head and norm."""
    total, embedding = count_parameters(model), model["vocab_size"] * model["hidden_size"]
    if stages == 1:
        return total
    layers = model["num_hidden_layers"]
    inner = total - embedding * (1 if is_tied(model) else 2) - model["hidden_size"]
    return inner / layers * max(stage_layers(model, stages)) + embedding + model["hidden_size"]


LOGITS_BYTES = 1 << 30  # of float32 logits that are there at once where the head is computed in chunks


def _whole_head_bytes(tokens: int, columns: int) -> float:
    """Logits of a micro-batch and their gradient, float32, with `columns` of the vocabulary on a rank."""
    return 2 * 4 * columns * tokens


def _chunked_head_bytes(columns: int, hidden: int, width: int, trained: bool) -> float:
    """A chunk of logits and its gradient in the weight's dtype, with half a chunk of temporaries, and the
    gradient of a weight that is trained, summed in float32 and then in the weight's own dtype
    (trainer/megatron/head.py)."""
    return LOGITS_BYTES * (1.5 + width / 4) + trained * (4 + width) * columns * hidden


def head_in_chunks(tokens: int, columns: int, hidden: int, width: int, trained: bool = True) -> bool:
    """Whether log-probs of so many tokens need less memory chunk by chunk than all at once. `trained`: the
    head's weight has a gradient."""
    return _whole_head_bytes(tokens, columns) > _chunked_head_bytes(columns, hidden, width, trained)


def _head_bytes(tokens: int, columns: int, hidden: int, width: int, trained: bool) -> float:
    return min(_whole_head_bytes(tokens, columns), _chunked_head_bytes(columns, hidden, width, trained))


def teacher_head_bytes(model: dict, width: int, tensor: int, tokens: int) -> float:
    """How much more the head takes beside a teacher's: its logits then come in chunks, however few they are
    (trainer/megatron/distillation.py)."""
    columns = math.ceil(model["vocab_size"] / tensor)
    chunked = _chunked_head_bytes(columns, model["hidden_size"], width, True)
    return max(0.0, chunked - _whole_head_bytes(tokens, columns))


def _kept_bytes(model: dict, width: int) -> tuple[float, float, float]:
    """Bytes per token that a layer keeps for the backward pass: its input; all; and all with selective
    recomputation.

    After Korthikanti et al., arXiv 2205.05198, section 4.1, with attention that keeps no scores but their
    normalizer of each head. The residual before each of the two norms, in float32
    (trainer/megatron/residual.py); the output of each norm; rotated queries and keys, values, and
    attention's output; where queries and keys, or what is added to the residual, are normalized, these before
    it; and of the feed-forward part the two halves of its activation's input, and the output. Selective
    recomputation keeps neither the norms' outputs nor the activation's (trainer/megatron/recompute.py); of
    experts nothing but their input.
    """
    hidden, heads, experts = model["hidden_size"], model["num_attention_heads"], experts_of(model)
    projected = (heads + kv_heads(model)) * head_size(model)
    copies = 3 if family_of(model).qk_norm else 2
    after = len(family_of(model).norms) - 2
    stays = 8 * hidden + copies * width * projected + 4 * heads + after * width * hidden
    if experts:
        routed = routed_activations(experts, hidden, width)
        return 4 * hidden, stays + 2 * width * hidden + routed, stays + width * hidden
    stays += 2 * width * model["intermediate_size"]
    return 4 * hidden, stays + width * (2 * hidden + model["intermediate_size"]), stays


def _layers_in_flight(model: dict, trainer: TrainerConfig) -> tuple[int, int]:
    """Layers times micro-batches whose activations a stage keeps at once: of the fullest stage, and of the
    last one. With chunks: Megatron's schedule (0.16.1, pipeline_parallel/schedules.py,
    `get_pp_rank_microbatches`) has run so many chunks forward before it runs the first one backward."""
    stages, chunks = trainer.pipeline_parallel, trainer.virtual_stages
    if chunks > 1:
        layers, turns = max(1, model["num_hidden_layers"] // (stages * chunks)), (chunks - 1) * stages + 1
        return layers * (2 * (stages - 1) + turns), layers * turns
    first, others = stage_layers(model, stages)
    return max(stages * first, (stages - 1) * others), others or first


def trainer_bytes(model: dict, width: int, trainer: TrainerConfig, adapter: int = 0) -> int:
    """Estimated bytes on the fullest trainer GPU. `width`: bytes of a served weight (2 for bfloat16);
    `adapter`: parameters of a low-rank adapter on this GPU, which then alone are trained, 0 = no adapter.

    State, per parameter: the weight, a float32 gradient, Adam's two float32 moments, and a float32 copy
    unless the weight is float32; of one that is not trained the weight.

    Activations: `_kept_bytes` of each layer, split over the tensor-parallel ranks (with sequence
    parallelism). With full recomputation only a layer's input stays. Either way one more layer is on the GPU,
    recomputed, or as the gradients of the backward pass; and one whole pack of a layer's input, gathered from
    the ranks, with its gradient. The first of p pipeline stages keeps p micro-batches, so stages don't make
    activations fewer; the second keeps one less, virtual stages keep more. The last stage has the last hidden
    states of the whole pack, and the logits and their gradient in float32, all at once or in chunks,
    whichever is less. `recompute_activations=auto` counts as none. Context parallelism leaves a rank as many
    tokens as `tokens_per_microbatch`, and attention as many values.

    These are Megatron's own layers. Transformer Engine's keep the residual in the parameters' dtype, and what
    norms give with selective recomputation too: no more than this.
    """
    tensor, stages, tokens = trainer.tensor_parallel, trainer.pipeline_parallel, trainer.tokens_per_microbatch
    ranks = trainer.data_parallel * trainer.context_parallel if trainer.distributed_optimizer else 1
    resident, moments, routed = width + 4, 8 if width == 4 else 12, _stage_experts(model, stages)
    stage = _stage_parameters(model, stages)
    state = state_bytes((stage - routed) / tensor, resident, moments, ranks)
    copies = expert_replicas(trainer) if trainer.distributed_optimizer else 1
    state += state_bytes(routed / expert_shards(trainer), resident, moments, copies)
    if adapter:
        state = stage / tensor * width + state_bytes(adapter, resident, moments, ranks)
    hidden = model["hidden_size"]
    source, layer, selective = (nbytes / tensor for nbytes in _kept_bytes(model, width))
    gathered = 2 * width * hidden if tensor > 1 else 0
    stays = {"full": source, "selective": selective}.get(trainer.recompute_activations, layer)
    most, of_last = _layers_in_flight(model, trainer)
    kept, last = stays * most, stays * of_last
    columns = math.ceil(model["vocab_size"] / tensor)
    head = _head_bytes(tokens, columns, hidden, width, not adapter) + tokens * gathered
    return int(state + tokens * (layer + gathered) + max(tokens * kept, tokens * last + head))


def rollout_bytes(model: dict, width: int, tensor: int, kv_tokens: int) -> int:
    """Estimated bytes on each GPU of an engine: its shard of weights and KV cache."""
    weights = count_parameters(model) * width / tensor
    return int(
        weights
        + kv_tokens * kv_shard_bytes(kv_bytes_per_token(model, width), kv_heads(model), tensor) / tensor
    )


def kv_shard_bytes(token_bytes: float, kv_heads: int, tensor: int) -> float:
    """Bytes of a token's KV cache over an engine's ranks: beyond one rank per head heads are copied."""
    return token_bytes * tensor / min(tensor, kv_heads)


def kv_tokens_that_fit(weights: float, token_bytes: float, kv_heads: int, tensor: int, gpu: float) -> int:
    """KV tokens of an engine on `tensor` GPUs with `gpu` usable bytes each, beside `weights` bytes over all;
    0 or less: no room.

    The inverse of `rollout_bytes`; the simulator's capacity of a replica too.
    """
    return int((gpu * tensor - weights) / kv_shard_bytes(token_bytes, kv_heads, tensor))
