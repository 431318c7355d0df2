"""Names and shapes of a safetensors file, and its bytes, without torch: what emulated engines and the
emulated relay know of weights."""

import json
import struct
from pathlib import Path


def weights_file(model: Path) -> tuple[list[tuple[str, list[int]]], bytes]:
    """(name, shape) of every tensor in file order, and the data bytes, of a model of one file."""
    (path,) = model.glob("*.safetensors")
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return [(name, entry["shape"]) for name, entry in ordered], content[8 + length :]
