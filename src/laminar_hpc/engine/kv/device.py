"""Pools in a GPU's memory: their rows go straight into another process's pool, else through pinned host
memory.

    with SharedKv(pool, slots) as shared: ...  source: gathered into memory that another process of this
                                               machine may map (CUDA IPC)
    take_shared(shared.ticket, pool, slots)    destination: scattered from there, checked chunk by chunk

    stage = Stage.of(pool, tokens)             a pool of `tokens` slots in host memory; stage.slots are all
                                               of them, in order
    stage.fill(pool, slots)                    source: one kernel for all layers, then one copy
    stage.empty(pool, slots)                   destination: the reverse

Everything runs in a CUDA stream of its own and has ended on return. Where the extension was built without
csrc/device.cu, or has no kernel for the GPU, torch's indexing does the same as Stage, a layer at a time;
SharedKv needs the extension.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.native import extension
from laminar_hpc.engine.kv.pool import Pool

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 17  # a block of threads each; of 0.2 GB they are more than a GPU runs at once


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

    def fill(self, pool: Pool, slots: torch.Tensor) -> None:
        """`slots` is int64 [tokens], on any device."""
        gather(pool, slots, self.image)

    def empty(self, pool: Pool, slots: torch.Tensor) -> None:
        """Writes the image's first len(slots) tokens into `slots`."""
        scatter(pool, slots, self.image[:, : len(slots)])


def gather(pool: Pool, slots: torch.Tensor, image: torch.Tensor) -> None:
    """The rows of `slots` into `image` [planes, tokens, heads, head_dim] on the host."""
    device = pool.tensors[0].device
    if device.type == "cuda" and has_kernels(device):
        with _own_stream(pool):
            staged = torch.empty(image.shape, dtype=image.dtype, device=device)
            _run("device_gather", pool, slots, staged)
            image.copy_(staged, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return
    where = slots.to(device)
    for plane, rows in zip(pool.tensors, image, strict=True):
        rows.copy_(plane.index_select(0, where))


def scatter(pool: Pool, slots: torch.Tensor, image: torch.Tensor) -> None:
    """The reverse of `gather`."""
    device = pool.tensors[0].device
    if device.type == "cuda" and has_kernels(device):
        with _own_stream(pool):
            _run("device_scatter", pool, slots, image.to(device, non_blocking=True).contiguous())
            torch.cuda.current_stream().synchronize()
        return
    where = slots.to(device)
    for plane, rows in zip(pool.tensors, image, strict=True):
        plane.index_copy_(0, where, rows.to(device))


def _run(kernel: str, pool: Pool, slots: torch.Tensor, image: torch.Tensor | int) -> bytes:
    """One kernel over all planes in the current stream, which has ended on return. `image` is contiguous on
    the GPU. Returns the sums, two 64-bit integers per chunk."""
    first, shape, planes = pool.tensors[0], pool.shape, pool.addresses
    where = slots.to(device=first.device, dtype=torch.int64).contiguous()
    # the kernel writes all of them, over the bus
    sums = torch.empty(2 * shape.chunks(len(slots), CHUNK_BYTES), dtype=torch.int64, pin_memory=True)
    stream = torch.cuda.current_stream(first.device)
    place = image if isinstance(image, int) else image.data_ptr()
    getattr(extension(), kernel)(
        planes.data_ptr(),
        len(planes),
        where.data_ptr(),
        len(where),
        first.stride(0) * first.element_size(),
        shape.row_bytes,
        shape.rows_per_chunk(CHUNK_BYTES),
        place,
        sums.data_ptr(),
        stream.cuda_stream,
    )
    stream.synchronize()
    return sums.numpy().tobytes()


class Ticket(msgspec.Struct, frozen=True):
    """What the other process needs to take what is shared."""

    handle: bytes
    tokens: int
    sums: bytes


class SharedKv:
    """The rows of `slots`, gathered into GPU memory that another process may map, as long as this object is
    open. Raises RuntimeError where CUDA has no such memory."""

    def __init__(self, pool: Pool, slots: torch.Tensor) -> None:
        with _own_stream(pool):
            self._address, handle = extension().device_share(
                len(pool.tensors) * len(slots) * pool.shape.row_bytes
            )
            try:
                self.ticket = Ticket(handle, len(slots), _run("device_gather", pool, slots, self._address))
            except Exception:
                extension().device_unshare(self._address)
                raise

    def __enter__(self) -> "SharedKv":
        return self

    def __exit__(self, *_: object) -> None:
        extension().device_unshare(self._address)


def take_shared(ticket: Ticket, pool: Pool, slots: torch.Tensor) -> None:
    """Scatters what another process shares. Raises KvRefused, with the slots written, where a chunk's sums
    differ, and RuntimeError where CUDA cannot map it: the GPUs may not reach one another."""
    if ticket.tokens != len(slots):
        raise KvRefused(
            f"KV move refused: {ticket.tokens} tokens are shared, {len(slots)} slots were reserved"
        )
    with _own_stream(pool):
        address = extension().device_map(ticket.handle)
        try:
            sums = _run("device_scatter", pool, slots, address)
        finally:
            extension().device_unmap(address)
    if sums != ticket.sums:
        places = range(0, len(sums), 16)
        number = next((i for i in places if sums[i : i + 16] != ticket.sums[i : i + 16]), 0) // 16
        raise KvRefused(f"KV chunk {number} refused: its checksum differs")


@contextlib.contextmanager
def _own_stream(pool: Pool) -> Iterator[None]:
    device = pool.tensors[0].device
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
