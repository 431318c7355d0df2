"""Names and shapes of a safetensors file, and its bytes, without torch: what emulated engines and the
emulated relay know of weights."""

import json
import math
import struct
from pathlib import Path

from laminar_hpc.config.adapters import adapter_tensors, widths_of
from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.weights.manifest import ITEM_BYTES


def published(config: RunConfig) -> tuple[list[tuple[str, list[int]]], bytes]:
    """What `weights_file` gives, of a publication of this run: of a new adapter where there is one."""
    path, lora = Path(config.model.path), config.model.lora
    if lora.rank == 0:
        return weights_file(path)
    model = model_config(config.model.path)
    tensors = adapter_tensors(widths_of(model), model["num_hidden_layers"], lora)
    size = sum(math.prod(shape) for _, shape in tensors) * ITEM_BYTES[config.model.dtype]
    return [(name, list(shape)) for name, shape in tensors], bytes(size)


def weights_file(model: Path) -> tuple[list[tuple[str, list[int]]], bytes]:
    """(name, shape) of every tensor in file order, and the data bytes, of all files of a model."""
    tensors, data = list[tuple[str, list[int]]](), list[bytes]()
    for path in sorted(model.glob("*.safetensors")):
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        tensors += [(name, entry["shape"]) for name, entry in ordered]
        data.append(content[8 + length :])
    return tensors, b"".join(data)
