"""One publication on its way through a relay: chunk k + 1 comes in while chunk k goes out and its sums are
taken.

    upstream --receive--> slot (available bytes grow) --send--> downstream
                              \\--sums of what is there

The sender reads straight from the slot, so a slow or stuck neighbour downstream never holds up what comes in.
Changes are put on top of the slot of the id before, and go on as they came to a neighbour that has that id
from here, to any other one in full, from the slot.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.delta import FULL, Frame, FrameWrong, apply, unit_bytes
from laminar_hpc.weights.links.link_device import DeviceEnd
from laminar_hpc.weights.links.links import Link, Posted
from laminar_hpc.weights.links.meeting import LinkBroken
from laminar_hpc.weights.links.staging import RECEIVING, SENDING
from laminar_hpc.weights.links.streams import StreamEvent
from laminar_hpc.weights.manifest import Manifest
from laminar_hpc.weights.relay.arriving import ArrivingSums
from laminar_hpc.weights.relay.frames import arriving_frames
from laminar_hpc.weights.stream import encode_header, encode_sums, take_sums

_POSTED_AHEAD = 2  # chunks that may arrive while an earlier one is looked at


class StreamDamaged(LaminarError):
    """What arrived is not what was sent."""


@dataclass
class Changes:
    """Of a stream that comes on top of other weights: their id and bytes, and by the number of its chunk each
    frame that is still to go on; chunks without one go from the slot."""

    base_id: int
    base: torch.Tensor
    frames: dict[int, Frame] = field(default_factory=dict)


class WeightStream:
    """Weights in a slot, complete or still arriving. `data` is uint8 [manifest.data_bytes]; its first `there`
    bytes are valid."""

    def __init__(
        self, manifest: Manifest, data: torch.Tensor, chunk: int | None, slot: int = 0, complete: bool = False
    ) -> None:
        self.manifest = manifest
        self.data = data
        self.slot = slot
        self.chunk_bytes = chunk  # None until whoever sends it first has decided
        self.there = data.numel() if complete else 0
        self.complete = complete  # the sums are in the manifest
        self.changes: Changes | None = None
        self.passed_on: int | None = None  # epoch of the link that it goes on over
        self._broken = ""
        self._changed = threading.Condition()
        self._writing = threading.Lock()

    @property
    def chunk(self) -> int:
        assert self.chunk_bytes is not None
        return self.chunk_bytes

    def grown(self, there: int, complete: bool = False) -> None:
        with self._changed:
            self.there = there
            self.complete = complete
            self._changed.notify_all()

    def broke(self, why: str) -> None:
        """The rest will not come: whoever waits for it is told. Nothing is written to `data` any more when
        this returns."""
        with self._writing, self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what this process writes to `data`. Raises LinkBroken when the rest will not come: the slot
        may be another stream's."""
        with self._writing:
            if self._broken:
                raise LinkBroken(self._broken)
            yield

    def wait(self, there: int, complete: bool, seconds: float) -> None:
        """Until so many bytes are there, and the sums if `complete`. Raises LinkBroken when they will not
        come, or not in time."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._broken or (self.there >= there and self.complete >= complete), seconds
            )
            if not reached or self._broken:
                raise LinkBroken(
                    self._broken or f"weight id {self.manifest.weight_id} stood still for {seconds:.0f} s"
                )


def receive_stream(link: Link, stream: WeightStream) -> None:
    """Receives what follows the header into `stream`; returns when the sums of all tensors are equal to the
    sender's.

    Raises LinkBroken, or StreamDamaged; whoever waits for the rest of the stream gets LinkBroken then.
    """
    manifest, size = stream.manifest, stream.manifest.data_bytes
    arriving = ArrivingSums(manifest, stream.data)
    try:
        for there in (
            _in_full(link, stream, arriving)
            if stream.changes is None
            else _changed(link, stream, stream.changes)
        ):
            stream.grown(there)
            arriving.grown(there)
        arriving.grown(size)
        take_sums(manifest, link.receive_bytes())
        wrong = [
            e.name
            for e, both in zip(manifest.tensors, arriving.sums, strict=True)
            if (e.sum_words, e.sum_indexed) != both
        ]
        if wrong:
            raise StreamDamaged(
                f"{len(wrong)} tensors of weight id {manifest.weight_id}, first {wrong[0]}, "
                f"came from {link.peer} with other sums than they were made with; "
                "check the network and memory of this machine and of those before it in the chain"
            )
    except LaminarError as error:
        stream.broke(str(error))
        raise
    stream.grown(size, complete=True)


def _in_full(link: Link, stream: WeightStream, arriving: ArrivingSums) -> Iterator[int]:
    """Receives the data bytes; gives how many are there."""
    if link.device_end is not None:
        yield from _through_device(link, link.device_end, stream, arriving)
        return
    size, first = stream.data.numel(), 0
    posted = deque[tuple[Posted, torch.Tensor]]()
    while stream.there < size:
        while first < size and len(posted) <= _POSTED_AHEAD:
            part = stream.data[first : first + stream.chunk]
            posted.append((link.take(part), part))
            first += part.numel()
        work, part = posted.popleft()
        with link.taken(work, part) as there:
            if there is not part:
                with stream.writing():
                    arriving.put(stream.there, there)
        yield stream.there + part.numel()


def _through_device(
    link: Link, device: DeviceEnd, stream: WeightStream, arriving: ArrivingSums
) -> Iterator[int]:
    """The same over NCCL: while chunk k is copied to pinned memory, chunk k + 1 arrives in the device, and
    the host puts chunk k - 1 into the slot."""
    parts = stream.data.split(stream.chunk)
    staging = device.staging(parts[0].numel())
    posted = deque[Posted]()
    copied: StreamEvent | None = None  # chunk number - 1 to its pinned memory

    def put(number: int) -> int:
        """Chunk `number` into the slot."""
        part = parts[number]
        assert copied is not None
        link.reach(copied)
        with stream.writing():
            arriving.put(stream.there, staging.host(number, part.numel()))
        return stream.there + part.numel()

    for number, part in enumerate(parts):
        while number + len(posted) < min(len(parts), number + RECEIVING):
            ahead = number + len(posted)
            posted.append(link.take(staging.device(ahead, parts[ahead].numel())))
        target = staging.device(number, part.numel())
        link.finish(posted.popleft(), target)
        event = device.copy(staging.host(number, part.numel()), target)
        if number:
            yield put(number - 1)
        copied = event
    yield put(len(parts) - 1)


def _changed(link: Link, stream: WeightStream, changes: Changes) -> Iterator[int]:
    """The same of frames, put on top of the base as they come; kept for the next relay."""
    parts, bases = stream.data.split(stream.chunk), changes.base.split(stream.chunk)
    width, keeps = unit_bytes(stream.manifest), stream.passed_on is not None
    try:
        for number, (frame, placed) in enumerate(arriving_frames(link, parts, width, keeps)):
            if not placed:
                with stream.writing():
                    apply(frame, bases[number], parts[number], width)
            if keeps and int(frame.head[0]) != FULL:
                changes.frames[number] = frame
            yield stream.there + parts[number].numel()
    except FrameWrong as error:
        raise StreamDamaged(f"weight id {stream.manifest.weight_id} from {link.peer}: {error}") from None


class _Giver:
    """Sends the chunks of a slot, or changes to them, of `size` bytes at most. Over NCCL the host puts one
    into pinned memory while the one before is copied to the device and leaves it."""

    def __init__(self, link: Link, size: int) -> None:
        self._link = link
        self._number = 0
        self._staging = link.device_end.staging(size) if link.device_end is not None else None
        self._leaving = deque[tuple[Posted, torch.Tensor]]()

    def chunk(self, part: torch.Tensor) -> None:
        """Returns when `part` may be overwritten."""
        link, staging, end = self._link, self._staging, self._link.device_end
        if staging is None or end is None:
            link.finish(link.give(part), part)
            return
        if len(self._leaving) == SENDING:
            link.finish(*self._leaving.popleft())
        host, device = (
            staging.host(self._number, part.numel()),
            staging.device(self._number, part.numel()),
        )
        host.copy_(part)
        end.copy(device, host)
        self._leaving.append((link.give(device), device))
        self._number += 1

    def end(self) -> None:
        """Returns when all have left."""
        while self._leaving:
            self._link.finish(*self._leaving.popleft())


def send_stream(link: Link, stream: WeightStream) -> None:
    """Sends a publication as its bytes become available: as changes if those came and this link has brought
    the weights that they change. Raises LinkBroken, also when they do not come."""
    manifest, data, chunk, changes = stream.manifest, stream.data, stream.chunk, stream.changes
    began, complete = time.monotonic(), stream.complete
    as_changes = changes is not None and changes.base_id == link.weight_id
    link.send_bytes(encode_header(manifest, chunk, link.weight_id if as_changes else None))
    give = _Giver(link, min(chunk, manifest.data_bytes))
    for number, first in enumerate(range(0, manifest.data_bytes, chunk)):
        part = data[first : first + chunk]
        stream.wait(first + part.numel(), False, link.seconds)
        frame = changes.frames.pop(number, None) if changes is not None else None
        if as_changes:
            head, payload = frame or Frame(torch.tensor([FULL, 0]), part)
            link.send(head)
            give.chunk(payload)
        else:
            give.chunk(part)
    give.end()
    stream.wait(manifest.data_bytes, True, link.seconds)
    link.send_bytes(encode_sums((entry.sum_words, entry.sum_indexed) for entry in manifest.tensors))
    if complete:  # else the pace may have been that of the link before
        link.sent(manifest.data_bytes, -(-manifest.data_bytes // chunk), time.monotonic() - began)
