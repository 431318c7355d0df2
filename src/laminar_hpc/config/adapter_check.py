"""Whether a run can train a low-rank adapter, and whether the one that it is to go on from is such an
adapter: of this model, of the rank, alpha and layers that the run has, and in PEFT's own layout. Called
before anything starts; reads headers, and imports no torch.
"""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from laminar_hpc.config.adapters import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    TARGETS,
    adapter_tensors,
    widths_of,
)
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.experts import experts_of
from laminar_hpc.config.models import read_json, vocabulary
from laminar_hpc.config.schema import LoraConfig, RunConfig

_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(\w+\.(\w+))\.lora_([AB])\.weight")
_HUB_CACHE = re.compile(r"models--(.+?)/snapshots/[0-9a-f]+")  # a folder of the Hugging Face hub's cache
_HEADER_MAX = 100 << 20  # bytes; safetensors' own limit
# Of an adapter_config.json: what changes the product, each with its one value that does not.
_PLAIN: dict[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_qalora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
NOT_TRIED = ("glm4", "gemma3_text")  # families with layers or norms that adapters are not tried with
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")  # init_lora_weights whose base is another model


def adapter_problems(config: RunConfig, model: dict | None) -> list[str]:
    """One line for each thing that is wrong with model.lora; without a model, what needs its numbers is left
    out."""
    lora = config.model.lora
    if lora.rank == 0:
        none = "set model.lora.rank too, to the adapter's"
        return [f"model.lora.path={lora.path} does nothing while model.lora.rank=0; {none}"] * bool(lora.path)
    if model is not None and experts_of(model) is not None:
        return [
            f"model.lora.rank={lora.rank}: a mixture of experts is trained whole; set it to 0, or use a "
            "dense model"
        ]
    if model is not None and model.get("model_type") in NOT_TRIED:
        return [
            f"model.lora.rank={lora.rank}: adapters are not tried with the family "
            f"{model['model_type']}; set it to 0, or use another model"
        ]
    if not lora.path or model is None:
        return []
    try:
        wrong = next(_of_directory(lora, config.model.path, model), "")
    except LaminarError as error:
        wrong = str(error)
    return [f"model.lora.path={lora.path}: {wrong}"] if wrong else []


def _of_directory(lora: LoraConfig, base: str, model: dict) -> Iterator[str]:
    folder = Path(lora.path)
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        yield f"no {ADAPTER_CONFIG_FILE} there; {_meant(folder)}"
        return
    settings = read_json(folder / ADAPTER_CONFIG_FILE)
    yield from _of_settings(lora, settings)
    yield from _of_base(folder, str(settings.get("base_model_name_or_path") or ""), base)
    if not (folder / ADAPTER_FILE).is_file():
        yield f"no {ADAPTER_FILE} there; save the adapter anew with PEFT, which writes that file"
        return
    yield from _of_tensors(lora, model, header(folder / ADAPTER_FILE))


def _meant(folder: Path) -> str:
    if (folder / "hf" / ADAPTER_CONFIG_FILE).is_file():
        return f"this is a checkpoint of ours, its adapter is model.lora.path={folder / 'hf'}"
    if written := sorted(folder.glob(f"checkpoints/step_*/hf/{ADAPTER_CONFIG_FILE}")):
        return f"this is a run of ours, its newest adapter is model.lora.path={written[-1].parent}"
    return "name a directory as PEFT's save_pretrained writes it"


def _of_settings(lora: LoraConfig, settings: dict) -> Iterator[str]:
    for key, plain in _PLAIN.items():
        value = settings.get(key, plain)
        if value != plain and (value or plain):
            yield (
                f"its {key}={json.dumps(value)} is not trained, only {json.dumps(plain)} is; "
                "merge that adapter into its model, and begin a new one"
            )
    start = str(settings.get("init_lora_weights")).lower()
    if start.startswith(_CHANGE_THE_BASE):
        yield (
            f"its init_lora_weights={start} took part of the model's weights into the adapter, so that "
            "it fits no plain model; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    for key, ours, own in (
        ("rank", lora.rank, settings.get("r")),
        ("alpha", lora.alpha, settings.get("lora_alpha")),
    ):
        if ours != own:
            yield f"its {key} is {own}, not model.lora.{key}={ours:g}; set model.lora.{key}={own}"


def _of_base(folder: Path, theirs: str, base: str) -> Iterator[str]:
    """The model that it was trained on, by its name: that of two models of one shape tells them apart."""
    if theirs and not is_same_model(theirs, base):
        yield (
            f"it belongs to {theirs}, not to model.path={base}; name that model, or where they are one and "
            f"the same, write {base} as base_model_name_or_path into its {ADAPTER_CONFIG_FILE}"
        )
    own, of_model = folder / "tokenizer.json", Path(base) / "tokenizer.json"
    if own.is_file() and of_model.is_file() and vocabulary(own) != vocabulary(of_model):
        yield (
            f"its tokenizer.json has other tokens than that of model.path={base}; name the model that it was "
            "trained on"
        )


def is_same_model(theirs: str, ours: str) -> bool:
    """Whether two paths or names are those of one model. Directories are, if they are one; of the hub's
    models, and of those that are not on this machine, the names decide."""
    if all(Path(each).is_dir() and not _HUB_CACHE.search(each) for each in (theirs, ours)):
        return Path(theirs).samefile(ours)
    return _model_name(theirs) == _model_name(ours)


def _model_name(path: str) -> str:
    """qwen2.5-7b of Qwen/Qwen2.5-7B, of a directory of that name, and of a folder of the hub's cache."""
    cached = _HUB_CACHE.search(path)
    return Path(cached[1].replace("--", "/") if cached else path.partition("@")[0]).name.lower()


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a safetensors file. Raises LaminarError."""
    try:
        with open(file, "rb") as content:
            (size,) = struct.unpack("<Q", content.read(8))
            fields = json.loads(content.read(min(size, _HEADER_MAX)))
        return {name: tuple(of["shape"]) for name, of in fields.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
        raise LaminarError(f"{file} is damaged or cut off ({error}); copy the adapter again") from None


def _of_tensors(lora: LoraConfig, model: dict, there: dict[str, tuple[int, ...]]) -> Iterator[str]:
    names = {name: _NAME.fullmatch(name) for name in there}
    if foreign := sorted(name for name, match in names.items() if match is None):
        yield (
            f"its tensor {foreign[0]} is not named as PEFT names an adapter of this model's linear layers "
            "(base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight); convert the adapter, or "
            "begin a new one"
        )
        return
    found = {match[3] for match in names.values() if match}
    if found != set(TARGETS[lora.targets]):
        fits = [name for name, modules in TARGETS.items() if set(modules) == found]
        cure = f"set model.lora.targets={fits[0]}" if fits else "no model.lora.targets names just these"
        yield f"it adapts {', '.join(sorted(found)) or 'nothing'}; {cure}"
        return
    wanted = dict(adapter_tensors(widths_of(model), model["num_hidden_layers"], lora))
    if there != wanted:
        wrong = sorted(name for name in there | wanted if there.get(name) != wanted.get(name))[0]
        yield (
            f"{wrong} is {there.get(wrong, 'missing')}, the model's is {wanted.get(wrong, 'not there')}; "
            "it belongs to a model of another shape"
        )
