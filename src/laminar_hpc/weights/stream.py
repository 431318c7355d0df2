"""How one weight id crosses a link: the layout, its data bytes in chunks, and behind them the sums, which are
known only then.

    size of a chunk, id that it changes (-1: none), manifest without sums | chunk | chunk | ... | sums

A chunk is its data bytes, or in a stream of changes a frame of weights/delta.py.

Used by trainer/publishing/, which packs chunk by chunk, and by the relay, which passes on and checks.
Imports no torch.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.manifest import ITEM_BYTES, Manifest, decode_manifest, encode_manifest

_IN_FULL = -1  # on the wire, in place of the id that a publication changes


class TensorSpan(NamedTuple):
    """Items [first, last), in row-major order, of tensor number `tensor` of a manifest; they begin at byte
    `offset` of their chunk."""

    tensor: int
    first: int
    last: int
    offset: int


def encode_header(manifest: Manifest, chunk: int, base_id: int | None = None) -> bytes:
    """What a stream begins with. The sender alone decides on the chunk's size, in bytes, and on the weight id
    whose changes follow (None: the weights follow in full)."""
    return struct.pack("<Qq", chunk, _IN_FULL if base_id is None else base_id) + encode_manifest(manifest)


def decode_header(frame: bytes) -> tuple[Manifest, int, int | None]:
    """(manifest, bytes per chunk, weight id that this one changes; None: in full). Raises LaminarError on
    anything else than a header."""
    try:
        chunk, base_id = struct.unpack_from("<Qq", frame)
        if chunk < 1:
            raise LaminarError("a chunk of no bytes")
        return decode_manifest(frame[16:]), chunk, None if base_id == _IN_FULL else base_id
    except (struct.error, msgspec.MsgspecError, LaminarError) as error:
        raise LaminarError(
            f"a stream of weights began with no header ({error}); "
            "run the same version of laminar_hpc everywhere"
        ) from None


def chunks(manifest: Manifest, size: int) -> list[list[TensorSpan]]:
    """What lies in each chunk of `size` bytes (the last may be shorter), in order; a tensor may be cut
    anywhere between two items.

    `size` is a multiple of 4; tensors lie without gaps, as manifest.layout has them.
    """
    cut: list[list[TensorSpan]] = [[] for _ in range(-(-manifest.data_bytes // size))]
    for number, entry in enumerate(manifest.tensors):
        item, end = ITEM_BYTES[entry.dtype], entry.offset + entry.nbytes
        place = entry.offset
        while place < end:
            index = place // size
            stop = min(end, (index + 1) * size)
            cut[index].append(
                TensorSpan(
                    number,
                    (place - entry.offset) // item,
                    (stop - entry.offset) // item,
                    place - index * size,
                )
            )
            place = stop
    return cut


def encode_sums(sums: Iterable[Sequence[int]]) -> bytes:
    """(sum_words, sum_indexed) of each tensor, in the manifest's order: little-endian 64-bit words."""
    flat = [number for both in sums for number in both]
    return struct.pack(f"<{len(flat)}Q", *flat)


def take_sums(manifest: Manifest, frame: bytes) -> None:
    """Writes the sums of `encode_sums` into the manifest. Raises LaminarError when they are not those of so
    many tensors."""
    if len(frame) != 16 * len(manifest.tensors):
        raise LaminarError(
            f"weight id {manifest.weight_id} came with {len(frame)} bytes of sums, "
            f"{16 * len(manifest.tensors)} belong to its "
            f"{len(manifest.tensors)} tensors; run the same version of laminar_hpc everywhere"
        )
    for entry, both in zip(manifest.tensors, struct.iter_unpack("<2Q", frame), strict=True):
        entry.sum_words, entry.sum_indexed = both
