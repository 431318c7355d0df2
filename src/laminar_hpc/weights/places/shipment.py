"""Publications as they leave for another place: changes to the weights that it holds, else all of them.

The home relay keeps an image of the weights that each place has. The newest slot is compared with it chunk by
chunk (weights/delta.py), which takes as long as reading the slot; then the slot is free, however slow the
place's link is. What is published while a shipment is on its way is part of the next one.
"""

import bisect
import itertools
import logging
import mmap
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from laminar_hpc.line.messages.gate import piece_bytes, pieces_of
from laminar_hpc.weights.delta import encode, pack, unit_bytes
from laminar_hpc.weights.manifest import Manifest
from laminar_hpc.weights.slots import SlotGone, SlotHandle, SlotReader
from laminar_hpc.weights.stream import encode_header, encode_sums

log = logging.getLogger(__name__)
_CHUNK = 8 << 20  # bytes of weights that are compared, and put on top of the old ones, at a time
_numbers = itertools.count(1)


@dataclass
class Shipment:
    """The bytes of one stream, in parts, of which some may lie in the place's image."""

    weight_id: int
    base_id: int | None  # what it changes; None: nothing
    parts: list[memoryview]
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self._ends = list(itertools.accumulate(len(part) for part in self.parts))

    @property
    def size(self) -> int:
        """In bytes."""
        return self._ends[-1]

    @property
    def pieces(self) -> int:
        return pieces_of(self.size)

    def serves(self, held: int | None) -> bool:
        """Whether it brings something newer to who holds weight id `held`."""
        return self.base_id in (None, held) and (held is None or held < self.weight_id)

    def piece(self, number: int) -> memoryview:
        """Its bytes, without a copy where they lie in one part."""
        size = piece_bytes(self.size)
        first = number * size
        last, found = min(first + size, self.size), []
        index = bisect.bisect_right(self._ends, first)
        while first < last:
            begin = self._ends[index] - len(self.parts[index])
            stop = min(last, self._ends[index])
            found.append(self.parts[index][first - begin : stop - begin])
            first, index = stop, index + 1
        return found[0] if len(found) == 1 else memoryview(b"".join(found))


class PlaceFeed:
    """What one place gets: `offer` is called by the gate's thread, shipments are made by `maker`'s."""

    def __init__(
        self, place: str, reader: SlotReader, maker: ThreadPoolExecutor, made: Callable[[], None]
    ) -> None:
        """`made` is called by `maker`'s thread when `offer` has something new to say."""
        self.shipment: Shipment | None = None
        self.heard = time.monotonic()  # when the place asked last
        self._place = place
        self._reader = reader
        self._maker = maker
        self._made = made
        self._making: Future[Shipment | None] | None = None
        self._image = torch.empty(0, dtype=torch.uint8)
        self._image_id: int | None = None  # whose bytes it has; None while it is being written

    @property
    def is_idle(self) -> bool:
        """Nothing is being made."""
        return self._making is None or self._making.done()

    def offer(self, held: int | None) -> Shipment | None:
        """The newest weights for who holds weight id `held`; None while they are made, or if there are none
        that are newer."""
        self.heard = time.monotonic()
        if self._making is not None:
            if not self._making.done():
                return None
            self.shipment = made = self._making.result()
            self._making = None
            if made is not None and made.serves(held):
                return made  # whatever is newer by now: else one who publishes fast would never be served
        there = self.shipment
        if there is not None and there.serves(held):
            return there
        newest_id = self._reader.newest_id()
        if newest_id is None or (held is not None and newest_id <= held):
            return None
        self._making = self._maker.submit(self._make, held)
        self._making.add_done_callback(lambda _: self._made())
        return None

    def _make(self, held: int | None) -> Shipment | None:
        newest = self._reader.newest()
        if newest is None:
            return None
        try:
            self.shipment = None  # its parts may lie in the image
            base_id = held if held is not None and self._has_image(held, newest.manifest) else None
            with self._reader.lease(newest):
                self._image_id = None
                parts = list(self._parts(newest, base_id))
                self._image_id = newest.weight_id
        except SlotGone:
            return None  # it is being rewritten: there is a newer one soon
        made = Shipment(newest.weight_id, base_id, parts)
        over = made.size / newest.manifest.data_bytes
        how = "in full" if base_id is None else f"as changes to weight id {base_id}"
        log.info(
            "weight id %d goes to place %s %s: %.4f of its bytes", made.weight_id, self._place, how, over
        )
        return made

    def _has_image(self, held: int, manifest: Manifest) -> bool:
        """Whether the image has the bytes of weight id `held`; from its slot, if that is still there."""
        if self._image_id != held or self._image.numel() != manifest.data_bytes:
            try:
                slot = self._reader.find(held)
                with self._reader.lease(slot):
                    self._copy(_bytes_of(slot))
            except SlotGone:
                return False
            self._image_id = held
        return self._image.numel() == manifest.data_bytes

    def _copy(self, data: torch.Tensor) -> None:
        self._image_id = None
        if self._image.numel() != data.numel():
            self._image = torch.empty(data.numel(), dtype=torch.uint8)
        self._image.copy_(data)

    def _parts(self, newest: SlotHandle, base_id: int | None) -> Iterator[memoryview]:
        """A stream of weights/stream.py; the image has the newest weights when it ends."""
        manifest, data = newest.manifest, _bytes_of(newest)
        yield from _framed(encode_header(manifest, _CHUNK, base_id))
        if base_id is None:
            self._copy(data)
            yield self._image.numpy().data
        else:
            for first in range(0, manifest.data_bytes, _CHUNK):
                yield from self._changes(data[first : first + _CHUNK], first, unit_bytes(manifest))
        yield from _framed(encode_sums((entry.sum_words, entry.sum_indexed) for entry in manifest.tensors))

    def _changes(self, data: torch.Tensor, first: int, width: int) -> Iterator[memoryview]:
        image = self._image[first : first + data.numel()]
        before = image.clone()
        head, payload = pack(encode(data.clone(), image, width), before, image, width)
        yield head.numpy().data.cast("B")
        inside = payload.data_ptr() == image.data_ptr()  # in full
        yield payload.numpy().data if inside else memoryview(payload.numpy().tobytes())


def _framed(content: bytes) -> tuple[memoryview, memoryview]:
    """As Link.receive_bytes takes it."""
    return memoryview(struct.pack("<q", len(content))), memoryview(content)


def _bytes_of(slot: SlotHandle) -> torch.Tensor:
    """uint8 [data_bytes], mapped; for as long as the slot is leased."""
    with open(slot.directory / slot.manifest.file, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory to be writable
    size = slot.manifest.data_bytes
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8, offset=len(mapping) - size))
