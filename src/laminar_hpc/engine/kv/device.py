"""Pools in a GPU's memory: their rows go straight into another process's pool, else through pinned host
memory.

    for ticket in share(pool, slots): ...      source: piece after piece gathered into memory that another
                                               process of this machine may map (CUDA IPC)
    take_shared(ticket, mapped, pool, slots)   destination: scattered from there, checked chunk by chunk

    stage = Stage.of(pool, tokens)             a pool of `tokens` slots in host memory; stage.slots are all
                                               of them, in order
    stage.fill(pool, slots)                    source: one kernel and one copy for each piece
    stage.empty(pool, slots)                   destination: the reverse

Everything runs in a CUDA stream of its direction, behind the event `after`, and has ended on return. What it
takes of the GPU is a buffer of PIECE_BYTES for each direction and one to share, for the life of the process,
however large and many the moves are. Where the extension was built without csrc/device.cu, or has no kernel
for the GPU, torch's indexing does the same as Stage, a layer at a time; sharing needs the extension.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import Shape
from laminar_hpc.engine.kv.native import extension
from laminar_hpc.engine.kv.pool import Pool
from laminar_hpc.weights.links.streams import StreamEvent, settle, streams_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
CHUNK_BYTES = 1 << 17  # a block of threads each; of 0.2 GB they are more than a GPU runs at once
PIECE_BYTES = 32 << 20  # at once through the device's memory; config/memory.py counts three of them
SHARE_SECONDS = 5.0  # for other moves of this engine to be through with the memory that it shares
_DEVICE_SECONDS = 60.0  # for all that was enqueued of a part


def on_gpu(pool: Pool) -> bool:
    """Whether the pool's rows lie on a GPU."""
    return pool.tensors[0].is_cuda


def can_share(pool: Pool) -> bool:
    """Whether another process's rows could be mapped for this pool, and its own for another."""
    return on_gpu(pool) and has_kernels(pool.tensors[0].device)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the extension's kernels run on this GPU: one row is moved, at the first call. They are built
    for some architectures (setup.py) and, as PTX, for later ones."""
    kernels = extension()
    if not hasattr(kernels, "device_gather"):
        return False
    row, image, sums = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(3))
    plane = torch.tensor([row.data_ptr()], dtype=torch.int64).to(device)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        kernels.device_gather(
            plane.data_ptr(), 1, slot.data_ptr(), 1, 16, 16, 1, image.data_ptr(), sums.data_ptr(), 0
        )
        sums.tolist()  # waits for it
    except RuntimeError as error:
        logger.warning(
            "laminar_hpc._kv cannot run on %s (%s): KV moves go through torch's indexing, a layer at a time; "
            "run make setup again on this machine",
            device,
            error,
        )
        return False
    return True


class Piece(NamedTuple):
    """Tokens [first, last) of planes [begin, end), the K or V of a layer each."""

    begin: int
    end: int
    first: int
    last: int

    def of(self, image: torch.Tensor) -> torch.Tensor:
        """The same of an image [planes, tokens, ...]."""
        return image[self.begin : self.end, self.first : self.last]


def pieces(shape: Shape, tokens: int) -> list[Piece]:
    """All of a part, in order, by at most PIECE_BYTES: several planes at once, else tokens of one."""
    planes, plane = 2 * shape.layers, tokens * shape.row_bytes
    if plane <= PIECE_BYTES:
        step = PIECE_BYTES // plane
        return [Piece(at, min(at + step, planes), 0, tokens) for at in range(0, planes, step)]
    step = PIECE_BYTES // shape.row_bytes
    return [
        Piece(at, at + 1, first, min(first + step, tokens))
        for at in range(planes)
        for first in range(0, tokens, step)
    ]


class _Way:
    """A stream of one direction, which one part uses at a time, and its buffer."""

    def __init__(self, device: torch.device) -> None:
        self.streams = streams_of(device)
        self._device = device
        self._stream: Any = self.streams.stream()
        self._lock = threading.Lock()
        with self.streams.on(self._stream):
            self._buffer = self.streams.empty(PIECE_BYTES)
            # sums that nobody reads; a chunk of whole rows is more than half of CHUNK_BYTES
            self.scratch = self.streams.empty(16 * (2 * PIECE_BYTES // CHUNK_BYTES + 1))

    def staged(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The buffer, as a tensor."""
        return self._buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    @contextlib.contextmanager
    def use(self, after: StreamEvent | None, seconds: float = _DEVICE_SECONDS) -> Iterator[None]:
        """Alone, in the stream, behind `after`; all that was enqueued has ended when the block has. Raises
        RuntimeError when others use it for `seconds`."""
        if not self._lock.acquire(timeout=seconds):
            raise RuntimeError(f"other moves of this engine took more than {seconds:g} s")
        try:
            with _on(self._device), self.streams.on(self._stream):
                if after is not None:
                    self.streams.after(after)
                yield
                settle(self.streams, _DEVICE_SECONDS, "a KV move")
        finally:
            self._lock.release()


_kept: dict[tuple[torch.device, str], Any] = {}  # of this process, for its life
_keeping = threading.Lock()


def _keep(device: torch.device, what: str, make: Callable[[torch.device], T]) -> T:
    with _keeping:
        if (device, what) not in _kept:
            _kept[device, what] = make(device)
        return _kept[device, what]


def _way(device: torch.device, out: bool) -> _Way:
    return _keep(device, "out" if out else "in", _Way)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launched(pool: Pool, stream: Any) -> StreamEvent:
    """Reached when all is done that this thread has enqueued so far, and that was to `stream`."""
    device = pool.tensors[0].device
    streams = streams_of(device)
    here = streams.event()
    with streams.on(stream):
        there = streams.event()
    with streams.on(_keep(device, "order", lambda _: streams.stream())):
        streams.after(here)
        streams.after(there)
        return streams.event()


def _by_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and has_kernels(device)


@dataclass(frozen=True)
class Stage:
    """`image`: [layers * 2, tokens, heads, head_dim] in host memory, pinned for a GPU; `pool` is a view of it
    with one slot per token."""

    image: torch.Tensor
    pool: Pool
    slots: torch.Tensor

    @classmethod
    def of(cls, pool: Pool, tokens: int) -> "Stage":
        first, shape = pool.tensors[0], pool.shape
        size = (2 * shape.layers, tokens, shape.heads, shape.head_dim)
        image = torch.empty(size, dtype=first.dtype, pin_memory=first.is_cuda)
        return cls(
            image, Pool.of(list(image[0::2]), list(image[1::2]), shape.page_size), torch.arange(tokens)
        )

    def fill(self, pool: Pool, slots: torch.Tensor, after: StreamEvent | None = None) -> None:
        """`slots` is int64 [tokens], on any device."""
        gather(pool, slots, self.image, after)

    def empty(self, pool: Pool, slots: torch.Tensor, after: StreamEvent | None = None) -> None:
        """Writes the image's first len(slots) tokens into `slots`."""
        scatter(pool, slots, self.image[:, : len(slots)], after)


def gather(pool: Pool, slots: torch.Tensor, image: torch.Tensor, after: StreamEvent | None = None) -> None:
    """The rows of `slots` into `image` [planes, tokens, heads, head_dim] on the host."""
    device = pool.tensors[0].device
    if not on_gpu(pool):
        for plane, rows in zip(pool.tensors, image, strict=True):
            rows.copy_(plane.index_select(0, slots.to(device)))
        return
    way = _way(device, True)
    with way.use(after):
        where = slots.to(device)
        if not _by_kernels(device):
            for plane, rows in zip(pool.tensors, image, strict=True):
                rows.copy_(plane.index_select(0, where))
            return
        for piece in pieces(pool.shape, len(slots)):
            part = piece.of(image)
            staged = way.staged(part.shape, part.dtype)
            _launch("device_gather", pool, where, piece, staged.data_ptr(), way.scratch)
            way.streams.copy(part, staged)


def scatter(pool: Pool, slots: torch.Tensor, image: torch.Tensor, after: StreamEvent | None = None) -> None:
    """The reverse of `gather`."""
    device = pool.tensors[0].device
    if not on_gpu(pool):
        for plane, rows in zip(pool.tensors, image, strict=True):
            plane.index_copy_(0, slots.to(device), rows.to(device))
        return
    way = _way(device, False)
    with way.use(after):
        where = slots.to(device)
        if not _by_kernels(device):
            for plane, rows in zip(pool.tensors, image, strict=True):
                plane.index_copy_(0, where, rows.to(device))
            return
        for piece in pieces(pool.shape, len(slots)):
            part = piece.of(image)
            staged = way.staged(part.shape, part.dtype)
            way.streams.copy(staged, part)
            _launch("device_scatter", pool, where, piece, staged.data_ptr(), way.scratch)


def _launch(
    kernel: str, pool: Pool, where: torch.Tensor, piece: Piece, image: int, sums: torch.Tensor
) -> None:
    """One kernel over a piece in the current stream. `where` is int64 [tokens] on the GPU; `image` is the
    address there of as many contiguous rows; `sums` takes two 64-bit integers per chunk."""
    first, shape, planes = pool.tensors[0], pool.shape, pool.addresses
    stream = torch.cuda.current_stream(first.device).cuda_stream if first.is_cuda else 0
    getattr(extension(), kernel)(
        planes.data_ptr() + planes.element_size() * piece.begin,
        piece.end - piece.begin,
        where.data_ptr() + where.element_size() * piece.first,
        piece.last - piece.first,
        first.stride(0) * first.element_size(),
        shape.row_bytes,
        shape.rows_per_chunk(CHUNK_BYTES),
        image,
        sums.data_ptr(),
        stream,
    )


def _run(
    kernel: str, pool: Pool, slots: torch.Tensor, image: torch.Tensor | int, piece: Piece | None = None
) -> bytes:
    """One kernel over a piece, by default over all, in the current stream, which has ended on return. `image`
    is contiguous on the GPU. Returns the sums, two 64-bit integers per chunk."""
    device, planes = pool.tensors[0].device, len(pool.tensors)
    where = slots.to(device=device, dtype=torch.int64).contiguous()
    piece = piece or Piece(0, planes, 0, len(where))
    rows = (piece.end - piece.begin) * (piece.last - piece.first)
    streams = streams_of(device)
    # the kernel writes all of them, over the bus
    sums = streams.pinned(16 * -(-rows // pool.shape.rows_per_chunk(CHUNK_BYTES)))
    _launch(kernel, pool, where, piece, image if isinstance(image, int) else image.data_ptr(), sums)
    settle(streams, _DEVICE_SECONDS, "a KV kernel")
    return sums.numpy().tobytes()


class Ticket(msgspec.Struct, frozen=True):
    """What the other process needs to take piece `number` of what is shared."""

    handle: bytes
    tokens: int
    number: int
    sums: bytes


class _SharedMemory:
    """Memory of this process that others may map. Never freed: a peer that is late may still read it, and
    finds other sums."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        with _on(device):
            self.address, self.handle = extension().device_share(PIECE_BYTES)


def share(pool: Pool, slots: torch.Tensor, after: StreamEvent | None = None) -> Generator[Ticket, None, None]:
    """The rows of `slots`, piece after piece, in memory that another process may map; the next piece takes
    the place of the last one, so it is asked for when that was taken. Raises RuntimeError where CUDA has no
    such memory, or other moves use it for SHARE_SECONDS."""
    device = pool.tensors[0].device
    memory = _keep(device, "shared", _SharedMemory)
    if not memory.lock.acquire(timeout=SHARE_SECONDS):
        raise RuntimeError(f"other moves shared rows for more than {SHARE_SECONDS:g} s")
    try:
        for number, piece in enumerate(pieces(pool.shape, len(slots))):
            with _way(device, True).use(after):
                sums = _run("device_gather", pool, slots, memory.address, piece)
            yield Ticket(memory.handle, len(slots), number, sums)
    finally:
        memory.lock.release()


class MappedKv:
    """Other processes' shared memory, mapped until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: dict[bytes, int] = {}

    def address(self, handle: bytes) -> int:
        """Raises RuntimeError where CUDA cannot map it: the GPUs may not reach one another."""
        if handle not in self._addresses:
            with _on(self._device):
                self._addresses[handle] = extension().device_map(handle)
        return self._addresses[handle]

    def close(self) -> None:
        for address in self._addresses.values():
            with _on(self._device):
                extension().device_unmap(address)
        self._addresses.clear()


def take_shared(
    ticket: Ticket, mapped: MappedKv, pool: Pool, slots: torch.Tensor, after: StreamEvent | None = None
) -> bool:
    """Scatters a piece that another process shares; returns whether it is the last one. Raises KvRefused,
    with the slots written, where a chunk's sums differ, and RuntimeError where CUDA cannot map it."""
    parts = pieces(pool.shape, len(slots))
    if ticket.tokens != len(slots) or not 0 <= ticket.number < len(parts):
        raise KvRefused(
            f"KV move refused: piece {ticket.number} of {ticket.tokens} tokens is shared, {len(slots)} slots "
            "were reserved"
        )
    address = mapped.address(ticket.handle)
    with _way(pool.tensors[0].device, False).use(after):
        sums = _run("device_scatter", pool, slots, address, parts[ticket.number])
    if sums != ticket.sums:
        places = range(0, len(sums), 16)
        number = next((i for i in places if sums[i : i + 16] != ticket.sums[i : i + 16]), 0) // 16
        raise KvRefused(f"KV chunk {number} refused: its checksum differs")
    return ticket.number + 1 == len(parts)
