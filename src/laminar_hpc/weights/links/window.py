"""Memory of one process that another one of the same machine maps, so that only a chunk's place crosses the
link, and its bytes are copied once.

It has no name in any folder and ends with its owner. Whoever is given its ticket finds it through the owner's
process, and knows by the secret at its end that it is the one: on another machine, or in another container,
the same numbers would name something else. Processes in different network namespaces count as machines of
their own.
"""

import mmap
import os
import secrets
import weakref

import msgspec
import torch

_SECRET_BYTES = 16


class _Ticket(msgspec.Struct, frozen=True):
    pid: int
    descriptor: int
    size: int
    secret: bytes
    network: int


class Window:
    """`tensor` is uint8 [size] in host memory, all of it taken. Raises OSError when there is not so much."""

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("laminar-window", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, size + _SECRET_BYTES)
        secret, whole = secrets.token_bytes(_SECRET_BYTES), mmap.mmap(descriptor, size + _SECRET_BYTES)
        whole[size:] = secret
        self.tensor = torch.frombuffer(whole, dtype=torch.uint8, count=size)
        weakref.finalize(self, os.close, descriptor)
        self.ticket = msgspec.json.encode(_Ticket(os.getpid(), descriptor, size, secret, _network()))

    def place(self, part: torch.Tensor) -> int:
        """The byte at which a contiguous tensor begins here. Raises ValueError for one that lies
        elsewhere."""
        first = part.data_ptr() - self.tensor.data_ptr()
        if not 0 <= first <= self.tensor.numel() - part.nbytes:
            raise ValueError(f"{part.nbytes} bytes that do not lie in the window of {self.tensor.numel()}")
        return first


def _network() -> int:
    return os.stat("/proc/self/ns/net").st_ino


def mapped(ticket: bytes) -> torch.Tensor | None:
    """Another process's window, uint8 [size]; None where it is out of reach."""
    try:
        there = msgspec.json.decode(ticket, type=_Ticket)
        if there.network != _network():
            return None
        descriptor = os.open(
            f"/proc/{there.pid}/fd/{there.descriptor}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except (OSError, msgspec.DecodeError):
        return None
    try:
        if os.fstat(descriptor).st_size != there.size + _SECRET_BYTES:
            return None
        whole = mmap.mmap(descriptor, there.size + _SECRET_BYTES)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return (
        torch.frombuffer(whole, dtype=torch.uint8, count=there.size)
        if whole[there.size :] == there.secret
        else None
    )
