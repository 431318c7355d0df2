"""GPU types and models: conf/simulation/tables/*.yaml, a user's own tables, and model directories.

`GPUS` and `MODELS` are read once; `add` puts a user's folder on top before a configuration is checked.
Imports no torch.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError, did_you_mean
from laminar_hpc.config.families import is_tied
from laminar_hpc.config.models import model_config
from laminar_hpc.config.yaml_text import load_yaml
from laminar_hpc.simulator.attention_layers import attention_of, unknown_layers

_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6
_WIDTH = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Gpu:
    """A GPU type: rates per GPU in bytes/s and dense bf16 FLOP/s, memory in bytes. `nvlink`: one direction.
    `nvlink_gpus`: those that NVLink joins, 0 = those of a machine. `decode_layer`: seconds per layer of a
    decode step beyond its reads, None = that of constants.py. `reads`: bytes/s of weights in a decode step,
    None = the usual share of `hbm`. `products`: share of the FLOP/s that large products alone reach. `price`
    in $ per hour is an assumption for examples only."""

    hbm: float
    flops: float
    memory: float
    nvlink: float
    nic: float
    pcie: float
    price: float
    machine: int = 8
    nvlink_gpus: int = 0
    decode_layer: float | None = None
    reads: float | None = None
    products: float = 0.72

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins."""
        return self.nvlink_gpus or self.machine


@dataclass(frozen=True)
class Model:
    """A model served and trained in bf16. Parameters: all, those that a token uses, and those that every
    decode step reads, without routed experts and, unless it is the head too, the embedding."""

    path: str
    config: dict[str, Any] = dataclasses.field(hash=False)
    tensor_parallel: int  # GPUs of one rollout replica
    parameters: float
    active_parameters: float
    read_parameters: float
    expert_parameters: float  # all routed experts together; 0 for a dense model
    expert_share: float  # the part of the routed experts that a token uses
    kv_bytes: float  # per token over all layers
    kv_heads: int  # over which tensor parallelism divides a token's KV
    attention_width: float  # heads x head size, over which attention scores and sums
    attention_layers: int  # with a KV cache
    kv_flops: float  # of a decode step, for each cached token over all layers
    state_bytes: float  # of a request in layers of linear attention

    @property
    def name(self) -> str:
        """The directory's name on the hub."""
        return Path(self.path).name

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def hidden(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return _experts(self.config)

    @property
    def latent(self) -> bool:
        """Attention is over one latent for all heads."""
        return bool(self.config.get("kv_lora_rank"))

    @property
    def expert_layers(self) -> int:
        return self.layers - int(self.config.get("first_k_dense_replace", 0)) if self.experts else 0

    @property
    def head_parameters(self) -> float:
        return float(self.config["vocab_size"] * self.hidden)


def _experts(c: dict[str, Any]) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    return next(
        (int(c[key]) for key in ("n_routed_experts", "num_experts", "num_local_experts") if c.get(key)), 0
    )


def model_of(path: str, config: dict[str, Any], tensor_parallel: int | None = None) -> Model:
    """A model from its config.json. Raises KeyError for what is missing."""
    c, experts, attention = config, _experts(config), attention_of(config)
    layers, hidden = c["num_hidden_layers"], c["hidden_size"]
    embedding = float(c["vocab_size"] * hidden)
    expert = 3.0 * hidden * (c.get("moe_intermediate_size") or c["intermediate_size"])
    dense_layers = c.get("first_k_dense_replace", 0) if experts else layers
    routed = (layers - dense_layers) * experts * expert
    shared = (layers - dense_layers) * (c.get("n_shared_experts") or 0) * expert
    shared += (layers - dense_layers) * 3.0 * hidden * (c.get("shared_expert_intermediate_size") or 0)
    dense = dense_layers * 3.0 * hidden * c["intermediate_size"] + shared
    read = attention.parameters + dense + embedding
    total = read + routed + (0.0 if is_tied(c) else embedding)
    share = c["num_experts_per_tok"] / experts if experts else 0.0
    return Model(
        path=path,
        config=config,
        tensor_parallel=tensor_parallel or _replica_size(total, c),
        parameters=total,
        active_parameters=read + routed * share,
        read_parameters=read,
        expert_parameters=routed,
        expert_share=share,
        kv_bytes=float(attention.full * attention.kv_values * _WIDTH),
        kv_heads=attention.kv_heads,
        attention_width=attention.width,
        attention_layers=attention.full,
        kv_flops=attention.full * attention.kv_flops,
        state_bytes=attention.state_bytes,
    )


def _replica_size(parameters: float, config: dict[str, Any]) -> int:
    """GPUs of a replica of a model that no table has: weights take at most a quarter of 80 GB each."""
    size = 2 ** max(0, math.ceil(math.log2(_WIDTH * parameters / 20e9)))
    while size > 1 and config["num_attention_heads"] % size:
        size //= 2
    return size


def _gpu_of(entry: dict[str, Any]) -> Gpu:
    layer, reads = entry.get("decode_layer_microseconds"), entry.get("decode_reads")
    return Gpu(
        **{key: float(entry[key]) * _GIGA for key in ("hbm", "memory", "nvlink", "nic", "pcie")},
        flops=float(entry["tflops"]) * _TERA,
        price=float(entry["price"]),
        machine=int(entry.get("machine", 8)),
        nvlink_gpus=int(entry.get("nvlink_gpus", 0)),
        decode_layer=None if layer is None else float(layer) * _MICRO,
        reads=None if reads is None else float(reads) * _GIGA,
        products=float(entry.get("products", Gpu.products)),
    )


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        found = load_yaml(file.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LaminarError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise LaminarError(f"{file}: it needs NAME: {{key: value, ...}} for each entry")
    return {str(name): {str(key): entry[key] for key in entry} for name, entry in found.items()}


def _check_keys(where: str, entry: dict[str, Any], needed: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Refuses keys that an entry lacks or that there are not."""
    for key in entry:
        if key not in (*needed, *others):
            raise LaminarError(f"{where}.{key}: no such key{did_you_mean(key, (*needed, *others))}")
    for key in needed:
        if key not in entry:
            raise LaminarError(f"{where} has no {key}")


def _check_whole(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LaminarError(f"{key}={str(value)[:40]}: must be a whole number, at least 1")


_GPU_NEEDS = ("hbm", "tflops", "memory", "nvlink", "nic", "pcie", "price")
_GPU_TAKES = ("machine", "nvlink_gpus", "decode_layer_microseconds", "decode_reads", "products")


def _gpus(file: Path) -> dict[str, Gpu]:
    made = {}
    for name, entry in _read(file).items():
        where = f"{file}: {name}"
        for key, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise LaminarError(f"{where}.{key}={value}: must be a number above 0")
        _check_keys(where, entry, _GPU_NEEDS, _GPU_TAKES)
        for key in ("machine", "nvlink_gpus"):
            _check_whole(f"{where}.{key}", entry.get(key, 8))
        if entry.get("products", 0) > 1:
            raise LaminarError(f"{where}.products={entry['products']}: must be a share, at most 1")
        made[name] = _gpu_of(entry)
    return made


_CONFIG_NEEDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def _checked_model(where: str, path: str, config: Any, tensor_parallel: int | None = None) -> Model:
    """A model from a config.json that somebody else has written; `where`: what errors begin with."""
    if not isinstance(config, dict):
        raise LaminarError(f"{where}: config must be the table of a config.json")
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        config = config["text_config"]  # of a model that sees or hears too
    for key in ("model_type", *_CONFIG_NEEDS):
        if key not in config:
            raise LaminarError(f"{where} has no {key}")
    for key in _CONFIG_NEEDS:
        _check_whole(f"{where}: {key}", config[key])
    if kinds := unknown_layers(config):
        raise LaminarError(f"{where}: layers of another kind than attention are not simulated ({kinds})")
    try:
        return model_of(path, config, tensor_parallel)
    except KeyError as missing:
        raise LaminarError(f"{where} has no {missing.args[0]}") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise LaminarError(f"{where}: its numbers are none of a model ({error})") from None


def _models(file: Path) -> dict[str, Model]:
    made = {}
    for name, entry in _read(file).items():
        where, size = f"{file}: {name}", entry.get("tensor_parallel")
        _check_keys(where, entry, ("path", "config"), ("tensor_parallel", "also"))
        if size is not None:
            _check_whole(f"{where}.tensor_parallel", size)
        made[name] = _checked_model(where, str(entry["path"]), entry["config"], size)
    return made


_TABLES = conf_directory() / "simulation" / "tables"
GPUS = _gpus(_TABLES / "gpus.yaml")
MODELS = _models(_TABLES / "models.yaml")


def add(folder: Path) -> None:
    """Entries of `folder`/gpus.yaml and `folder`/models.yaml. Raises LaminarError without either."""
    gpus, models = folder / "gpus.yaml", folder / "models.yaml"
    if not gpus.exists() and not models.exists():
        raise LaminarError(
            f"{folder}: neither gpus.yaml nor models.yaml is there; --config-dir names the folder above it"
        )
    if gpus.exists():
        GPUS.update(_gpus(gpus))
    if models.exists():
        MODELS.update(_models(models))


def add_directory(path: str) -> None:
    """Makes the directory `path` a model of that name. Raises LaminarError without a usable config.json."""
    MODELS[path] = _checked_model(f"{path}/config.json", path, model_config(path))
