"""What a slot holds: weight id, step, and name, shape, dtype and sums of every canonical tensor, plus where
it lies in model.safetensors.

Canonical means Hugging Face names and shapes in the serving dtype. The layout of a safetensors file follows
from the names and shapes alone, so a slot's file is laid out once and only its data bytes are rewritten for a
new id. Imports no torch: a rollout worker needs none.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence

import msgspec

from laminar_hpc.config.adapters import ADAPTER_FILE, ADAPTER_PREFIX
from laminar_hpc.config.models import WEIGHTS_FILE

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # by torch's name
_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MANIFEST_FILE = "manifest.json"


class TensorEntry(msgspec.Struct):
    """One canonical tensor; `offset` and `nbytes` are in bytes of the data part of the safetensors file."""

    name: str
    shape: list[int]
    dtype: str
    offset: int = 0
    nbytes: int = 0
    sum_words: int = 0
    sum_indexed: int = 0


class Manifest(msgspec.Struct, omit_defaults=True):
    """All tensors of one weight id, in file order; a lane's lists flat parts of them (weights/lanes.py)."""

    weight_id: int
    step: int
    dtype: str
    tensors: list[TensorEntry]
    begin: int = 0  # of a lane: bytes of the whole that lie before it
    whole: "Manifest | None" = None  # of a lane: the layout of all

    @property
    def data_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def file(self) -> str:
        """Returns the name of the safetensors file in its slot, as Hugging Face or PEFT has it."""
        whole = self.whole or self
        adapter = bool(whole.tensors) and whole.tensors[0].name.startswith(ADAPTER_PREFIX)
        return ADAPTER_FILE if adapter else WEIGHTS_FILE


def layout(tensors: Iterable[tuple[str, Sequence[int], object]], weight_id: int, step: int) -> Manifest:
    """A manifest without sums: tensors (name, shape, dtype or its name) one after the other, without gaps, in
    the given order."""
    entries, offset = [], 0
    for name, shape, dtype in tensors:
        kind = str(dtype).removeprefix("torch.")
        nbytes = math.prod(shape) * ITEM_BYTES[kind]
        entries.append(TensorEntry(name, list(shape), kind, offset, nbytes))
        offset += nbytes
    return Manifest(weight_id, step, entries[0].dtype if entries else "float32", entries)


def safetensors_header(manifest: Manifest) -> bytes:
    """The safetensors file's first part: a little-endian 64-bit length, then JSON padded with spaces to 8
    bytes."""
    fields: dict = {"__metadata__": {"format": "pt"}}
    for t in manifest.tensors:
        fields[t.name] = {
            "dtype": _SAFETENSORS_NAME[t.dtype],
            "shape": t.shape,
            "data_offsets": [t.offset, t.offset + t.nbytes],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON."""
    return msgspec.json.encode(manifest)


def decode_manifest(text: bytes) -> Manifest:
    """Raises msgspec.DecodeError or ValidationError on anything else than a manifest."""
    return msgspec.json.decode(text, type=Manifest)
