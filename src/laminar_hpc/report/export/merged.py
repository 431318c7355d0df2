"""`laminar export RUN_DIR --merged DIR`: the model of a run that trains a low-rank adapter, with the adapter
of its newest checkpoint added to the weights, as a Hugging Face directory. DIR appears when complete.

One file of weights at a time is in memory. A sum is computed in float32 and rounded once, to the run's
model.dtype; trainer and engines round the model's and the adapter's parts by themselves, so log-probs differ
from theirs by roundings.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE, ADAPTER_FILE, ADAPTER_PREFIX
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.models import INDEX_FILE, WEIGHTS_FILE, read_json
from laminar_hpc.store import checkpoints
from laminar_hpc.store.run_files import config_of
from laminar_hpc.weights.hf import TensorReader, copy_side_files, safetensors_parts, write_index


def export_merged(run_dir: Path, target: Path) -> str:
    """What was written, in a line. Raises LaminarError for what cannot be merged."""
    if target.exists():
        raise Refused([f"--merged {target} exists; name another directory"])
    model = config_of(run_dir).get("model") or {}
    written = checkpoints.steps(run_dir)
    if not written:
        raise Refused([f"{run_dir} has no checkpoint yet; wait for its first one"])
    checkpoint = checkpoints.checkpoint_path(run_dir, written[-1])
    adapter, base = checkpoint / "hf", Path(model.get("path") or "")
    if not (adapter / ADAPTER_CONFIG_FILE).is_file():
        raise Refused([f"{run_dir} trains the whole model: {adapter} is such a directory already"])
    if not (base / "config.json").is_file():
        raise Refused([f"the model of {run_dir} is not at model.path={base}; bring it back, it is needed"])
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with checkpoints.reading(checkpoint):
            if wrong := checkpoints.damage(checkpoint):
                raise LaminarError(f"{checkpoint} is damaged: {wrong}")
            beside.mkdir(parents=True)
            _merge(base, adapter, beside, getattr(torch, model.get("dtype", "float32")))
        beside.rename(target)
    except OSError as error:
        raise LaminarError(f"--merged {target} cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return f"{target}: {base} with the adapter of {checkpoint.name}"


def _merge(base: Path, adapter: Path, target: Path, dtype: torch.dtype) -> None:
    files, total = _files(base), 0
    with TensorReader(base) as weights, TensorReader(adapter, ADAPTER_FILE) as halves:
        for file in dict.fromkeys(files.values()):
            names = [name for name, of in files.items() if of == file]
            tensors = [(name, _merged(weights, halves, name, _scale(adapter), dtype)) for name in names]
            total += sum(t.nbytes for _, t in tensors)
            with open(target / file, "wb") as out:
                out.writelines(safetensors_parts(tensors))
    copy_side_files(base, target, dtype)
    if (base / INDEX_FILE).exists():
        write_index(target, dict(files), total)


def _files(base: Path) -> Mapping[str, str]:
    """Tensor -> the file that it is in."""
    if (base / INDEX_FILE).exists():
        return json.loads((base / INDEX_FILE).read_text())["weight_map"]
    with TensorReader(base) as weights:
        return dict.fromkeys(sorted(weights.names()), WEIGHTS_FILE)


def _scale(adapter: Path) -> float:
    settings = read_json(adapter / ADAPTER_CONFIG_FILE)
    return settings["lora_alpha"] / settings["r"]


def _merged(
    weights: TensorReader, halves: TensorReader, name: str, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """The model's tensor, with scale * B A if the adapter has them; [outputs, inputs] of a linear layer."""
    value = _whole(weights, name)
    first, second = (f"{ADAPTER_PREFIX}{name.removesuffix('.weight')}.lora_{half}.weight" for half in "AB")
    if first in halves.names():
        product = _whole(halves, second).float() @ _whole(halves, first).float()
        value = value.float().add_(product, alpha=scale)
    return value.to(dtype).contiguous()


def _whole(tensors: TensorReader, name: str) -> torch.Tensor:
    return tensors.narrow(name, 0, 0, tensors.shape(name)[0])
