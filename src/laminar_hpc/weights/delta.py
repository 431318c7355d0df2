"""What changed since the last publication, bucket by bucket: encoded by the trainer, put on top of the image
before by each relay.

A chunk of a stream of changes is a head (two 64-bit integers: its kind and the number of changed units) and a
payload, whichever is the smallest of

    FULL       the units as they are
    MASK       the changed units | a bit for every unit, 32 to a word
    OFFSETS    the changed units | 32 bits per block of BLOCK units: how many changed in it
               | of each its place in the block, 16 bits
    PACKED     for slow links, deflated; the payload's size stands above the kind's low byte. OFFSETS of 2
               bytes: the distance of each changed unit to the one before, 16 bits, and what was added to it.
               FULL and MASK of 4 bytes: what was added to each unit, 0, -1, 1, -2, ... as 0, 1, 2, 3, ...

Units have 2 bytes, or 4 where all tensors are float32, and are compared bit by bit. The changed ones ascend
and are padded to whole words. MASK costs 1/8 byte per unit and OFFSETS 2 per changed one, so the latter is
for less than 1 in 16. By laminar_hpc._sums (csrc/delta.cpp) where it is built and the bucket is in host
memory, else by torch and the kernels.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights import kernels
from laminar_hpc.weights.kernels.sums import extension
from laminar_hpc.weights.manifest import Manifest

FULL, MASK, OFFSETS, PACKED = 0, 1, 2, 3
BLOCK = 1 << 16
_UNIT = {2: torch.int16, 4: torch.int32}


class FrameWrong(LaminarError):
    """A frame that no sender makes."""


class Frame(NamedTuple):
    """A chunk as it crosses a link: `head` int64 [2] on the host, `payload` uint8 on the device that it came
    from."""

    head: torch.Tensor
    payload: torch.Tensor


def unit_bytes(manifest: Manifest) -> int:
    """The same of all lanes, so that a lane's border never lies inside one."""
    return 4 if all(entry.dtype == "float32" for entry in (manifest.whole or manifest).tensors) else 2


def payload_bytes(kind: int, changed: int, units: int, width: int) -> int:
    """Of a chunk of `units` of `width` bytes. Raises FrameWrong when there is no such chunk."""
    if kind & 0xFF == PACKED and 0 < kind >> 8 < units * width and 0 < changed <= units:
        return kind >> 8
    if kind not in (FULL, MASK, OFFSETS) or not 0 <= changed <= units:
        raise FrameWrong(
            f"a chunk of {units} units came as kind {kind} with "
            f"{changed} changed ones; run the same version everywhere"
        )
    if kind == FULL:
        return units * width
    return _padded(changed * width) + (
        4 * _words(units) if kind == MASK else 4 * _blocks(units) + 2 * changed
    )


def _padded(size: int) -> int:
    return -(-size // 4) * 4


def _words(units: int) -> int:
    return -(-units // 32)


def _blocks(units: int) -> int:
    return -(-units // BLOCK)


def _best(changed: int, units: int, width: int) -> int:
    """The kind with the smallest payload; the earlier one of equal ones."""
    return min((FULL, MASK, OFFSETS), key=lambda kind: payload_bytes(kind, changed, units, width))


@functools.lru_cache(maxsize=8)
def _max_changed(units: int, width: int) -> tuple[int, int]:
    """The greatest numbers of changed units with which a chunk is not FULL, and is OFFSETS; -1 if there is
    none."""

    def last(holds: Callable[[int], bool]) -> int:
        low, high = -1, units
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holds(middle) else (low, middle - 1)
        return low

    return last(lambda n: _best(n, units, width) != FULL), last(lambda n: _best(n, units, width) == OFFSETS)


# ---- the sender --------------------------------------------------------------------------------------------


class Image:
    """The bytes of the last publication, in host memory (of the model's size in the serving dtype), and what
    has changed since.

    `weight_id`: whose they are; None while they are of two publications, because one is on its way or was
    broken off.
    """

    def __init__(self, memory: torch.Tensor, width: int, full_every: int) -> None:
        """`memory`: uint8, of the lane's size, whatever it holds; `full_every`: of so many publications one
        goes in full, whatever has changed."""
        self._bytes = memory
        self._width = width
        self._full_every = full_every
        self.weight_id: int | None = None
        self._as_changes = 0  # publications in a row
        # units of the publication on its way
        self._known = False
        self._changed = 0

    def begin(self, held: int | None) -> int | None:
        """A publication begins, to a relay that holds weight id `held`: returns the id on top of which it may
        go as changes; None: in full."""
        due = self._as_changes + 1 >= self._full_every
        base = self.weight_id if self.weight_id == held and not due else None
        self._known = self.weight_id is not None
        self._changed = 0
        self.weight_id = None
        self._as_changes = 0 if base is None else self._as_changes + 1
        return base

    def take(self, first: int, bucket: torch.Tensor, as_changes: bool) -> Frame | None:
        """The image's bytes from `first` on become those of `bucket`. With `as_changes` returns the frame
        that makes them so elsewhere, which may use the bucket's memory and the image's until the next
        publication, and the bucket is of no use otherwise; else None."""
        part = self._bytes[first : first + bucket.numel()]
        if not self._known:
            part.copy_(bucket)
            return None
        frame = encode(bucket, part, self._width, as_changes)
        self._changed += int(frame.head[1])
        return frame if as_changes else None

    def complete(self, weight_id: int) -> float | None:
        """All buckets are taken: the fraction of elements that changed, None if the image before was of no
        single publication."""
        self.weight_id = weight_id
        return self._changed * self._width / max(1, self._bytes.numel()) if self._known else None


def encode(bucket: torch.Tensor, image: torch.Tensor, width: int, as_changes: bool = True) -> Frame:
    """The frame that turns `image` (flat uint8, on the host) into `bucket` (the same on any device); `image`
    is then equal to it.

    Without `as_changes` the bucket stays as it is and only the number in the head counts; else the payload
    may lie in the bucket's memory.
    """
    units = bucket.numel() // width
    max_changed, max_offsets = _max_changed(units, width) if as_changes else (-1, -1)
    if extension is None or bucket.is_cuda:
        return _encode_by_torch(bucket, image, width, max_changed)
    mask, counts = (
        torch.empty(_words(units), dtype=torch.int32),
        torch.empty(_blocks(units), dtype=torch.int32),
    )
    offsets = torch.empty(max(0, max_offsets), dtype=torch.int16)
    places = mask.data_ptr(), counts.data_ptr(), offsets.data_ptr()
    changed = extension.encode(
        bucket.data_ptr(), image.data_ptr(), units, width, *places, max_changed, max_offsets
    )
    if changed > max_changed:
        return _frame(FULL, changed, image)
    kind, end = _best(changed, units, width), _padded(changed * width)
    bucket[changed * width : end] = 0
    table = [mask] if kind == MASK else [counts, offsets[:changed]]
    for part in table:
        bucket[end : end + part.nbytes] = part.view(torch.uint8)
        end += part.nbytes
    return _frame(kind, changed, bucket[:end])


def _frame(kind: int, changed: int, payload: torch.Tensor) -> Frame:
    return Frame(torch.tensor([kind, changed], dtype=torch.int64), payload)


def _encode_by_torch(bucket: torch.Tensor, image: torch.Tensor, width: int, max_changed: int) -> Frame:
    new, old = bucket.view(_UNIT[width]), image.to(bucket.device).view(_UNIT[width])
    delta = kernels.delta_encode(new, old)
    changed, units = delta.indices.numel(), new.numel()
    image.copy_(bucket)
    if changed > max_changed:
        return _frame(FULL, changed, bucket)
    kind, values = _best(changed, units, width), delta.values.view(torch.uint8)
    if kind == MASK:
        flags = torch.zeros(32 * _words(units), dtype=torch.uint8, device=bucket.device)
        flags[delta.indices.long()] = 1
        weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bucket.device)
        table = [(flags.view(-1, 8) * weights).sum(1, dtype=torch.uint8)]
    else:
        counts = torch.bincount(delta.indices >> 16, minlength=_blocks(units)).to(torch.int32)
        table = [counts.view(torch.uint8), (delta.indices & 0xFFFF).to(torch.int16).view(torch.uint8)]
    padding = torch.zeros(_padded(values.numel()) - values.numel(), dtype=torch.uint8, device=bucket.device)
    return _frame(kind, changed, torch.cat([values, padding, *table]))


def pack(frame: Frame, before: torch.Tensor, after: torch.Tensor, width: int) -> Frame:
    """PACKED, at some 60 to 140 MB/s: OFFSETS of 2 bytes in a third to a half of the bytes, others of 4 in a
    third to two thirds; any other frame, and what gets no smaller, as it is. `before` and `after`: the image
    that `encode` has changed."""
    kind, changed = frame.head.tolist()
    old, new = (image.numpy().view(f"u{width}") for image in (before, after))
    parts = None
    if kind == OFFSETS and width == 2 and changed:
        parts = _sparse(frame.payload.cpu().numpy(), changed, old, new)
    elif kind != OFFSETS and width == 4 and changed:
        added = (new - old).view(np.int32)
        parts = ((added << 1) ^ (added >> 31)).view(np.uint8).reshape(1, -1, 4)[:, :, ::-1]
    if parts is None:
        return frame
    # bytes of one weight together, each of which deflate's codes fit
    deflate = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    packed = deflate.compress(parts.transpose(0, 2, 1).tobytes()) + deflate.flush()
    if len(packed) >= frame.payload.nbytes:
        return frame
    return _frame(PACKED | len(packed) << 8, changed, torch.frombuffer(bytearray(packed), dtype=torch.uint8))


def _sparse(payload: np.ndarray, changed: int, old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    """uint8 [2, changed, 2]: distances, and what was added. None where a distance has more than 16 bits."""
    end = _padded(2 * changed)
    counts = payload[end : end + 4 * _blocks(len(new))].view(np.int32)
    blocks = np.repeat(np.arange(len(counts)) * BLOCK, counts)
    places = blocks + payload[end + counts.nbytes :].view(np.uint16)
    distances = np.diff(places, prepend=0)
    if distances.max() >= 1 << 16:
        return None
    added = new[places] - old[places]
    return np.stack([distances.astype(np.uint16), added]).view(np.uint8).reshape(2, -1, 2)


# ---- the receiver ------------------------------------------------------------------------------------------


def apply(frame: Frame, base: torch.Tensor, target: torch.Tensor, width: int) -> None:
    """`base` with the frame's changes into `target`, flat uint8 on the host, as is the payload, which has
    `payload_bytes`.

    Raises FrameWrong, and the target is of no use, when the frame's places are not those of so many units of
    such a chunk.
    """
    (kind, changed), units = frame.head.tolist(), target.numel() // width
    if kind == FULL:
        target.copy_(frame.payload)
        return
    if kind & 0xFF == PACKED:
        _apply_packed(frame.payload, changed, base, target, width)
        return
    end = _padded(changed * width)
    if extension is None:
        fits = _apply_by_torch(frame, base, target, width)
    else:
        start = frame.payload.data_ptr()
        places = (start + end, 0, 0) if kind == MASK else (0, start + end, start + end + 4 * _blocks(units))
        fits = extension.apply(base.data_ptr(), target.data_ptr(), units, width, start, changed, *places)
    if not fits:
        raise FrameWrong(
            f"a chunk of {changed} changed units has not as "
            "many places inside it; check the network and memory"
        )


def _apply_by_torch(frame: Frame, base: torch.Tensor, target: torch.Tensor, width: int) -> bool:
    (kind, changed), units = frame.head.tolist(), target.numel() // width
    values, table = (
        frame.payload[: changed * width].clone().view(_UNIT[width]),
        frame.payload[_padded(changed * width) :].clone(),
    )
    if kind == MASK:
        shifts = torch.arange(8, dtype=torch.uint8)
        indices = torch.nonzero((table[:, None] >> shifts) & 1)
        indices = indices[:, 0] * 8 + indices[:, 1]
    else:
        counts = table[: 4 * _blocks(units)].view(torch.int32).long()
        if int(counts.min()) < 0 or int(counts.sum()) != changed:
            return False
        blocks = torch.repeat_interleave(torch.arange(len(counts)), counts)
        indices = blocks * BLOCK + (table[4 * _blocks(units) :].view(torch.int16).long() & 0xFFFF)
    if indices.numel() != changed or (changed and int(indices.max()) >= units):
        return False
    target.copy_(base)
    target.view(_UNIT[width])[indices] = values
    return True


def _apply_packed(
    payload: torch.Tensor, changed: int, base: torch.Tensor, target: torch.Tensor, width: int
) -> None:
    old, new = (data.numpy().view(f"u{width}") for data in (base, target))
    shape = (2, 2, changed) if width == 2 else (1, 4, len(new))
    try:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        parts = np.frombuffer(inflate.decompress(payload.numpy().data, math.prod(shape)), np.uint8)
        parts = parts.reshape(shape).transpose(0, 2, 1)
    except (zlib.error, ValueError) as error:
        raise FrameWrong(f"a chunk of {changed} changed units cannot be unpacked ({error})") from None
    if width == 4:
        added = np.ascontiguousarray(parts[0, :, ::-1]).view(np.uint32)[:, 0]
        np.add(old, (added >> 1) ^ -(added & 1), out=new)
        return
    distances, added = parts.copy().view(np.uint16)[..., 0]
    places = np.cumsum(distances, dtype=np.int64)
    if places[-1] >= len(new):
        raise FrameWrong(f"a chunk of {target.numel()} bytes has changes behind its end")
    target.copy_(base)
    new[places] += added
