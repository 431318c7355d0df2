"""What orders work on a device's memory: streams, events, and the host's bounded waits for them.

On a GPU a copy or a send returns before it has read its source; only an event tells when it has. In host
memory all is done when the call returns. Links, the relay's staging and the publisher use this in place of
torch.cuda, so that a test can put another device in its place (`KINDS`).
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from laminar_hpc.config.errors import LaminarError

log = logging.getLogger(__name__)
_POLL_SECONDS = 2e-5  # at least, between two looks at a device that the host waits for
_LONGEST_POLL_SECONDS = 0.01
_POLL_SHARE = 0.05  # of the time waited so far: each look takes the interpreter's lock, which training needs
_NO_ABORT = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read by each group's constructor
_constructing = threading.Lock()  # the environment is the whole process's


class StreamEvent(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the device has come that far."""


def until(reached: Callable[[], bool], seconds: float, what: str, given_up: Callable[[], bool]) -> None:
    """Waits for a device. Raises RuntimeError after `seconds`, or as soon as `given_up()` holds."""
    began = time.monotonic()
    while not reached():
        waited = time.monotonic() - began
        if given_up():
            raise RuntimeError("it was closed")
        if waited > seconds:
            raise RuntimeError(f"{what} was not done within {seconds:.0f} s")
        time.sleep(min(max(_POLL_SECONDS, _POLL_SHARE * waited), _LONGEST_POLL_SECONDS))


def settle(streams: "Streams", seconds: float, what: str) -> None:
    """Returns when all that was enqueued to this thread's current stream is done, which is `what`. Raises
    LaminarError after `seconds`."""
    try:
        until(streams.event().query, seconds, what, lambda: False)
    except RuntimeError as error:
        raise LaminarError(f"waited for its GPU: {error}") from None


class _Done:
    """The event of host memory."""

    def query(self) -> bool:
        return True


class Streams:
    """One device; this one is host memory, where what was called is done. Each thread has a current stream,
    to which everything that it enqueues goes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Names the device among all of the world; "" for host memory."""
        return ""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the memory of a device that works behind the host's back."""
        return False

    def stream(self) -> Any:
        """A new stream, in no order with any other."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Makes it the current stream of this thread for a block."""
        return contextlib.nullcontext()

    def event(self) -> StreamEvent:
        """Reached when all that was enqueued to the current stream so far is done."""
        return _Done()

    def after(self, event: StreamEvent) -> None:
        """What is enqueued to the current stream from here on begins after the event."""

    def empty(self, size: int) -> torch.Tensor:
        """Device memory, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8)

    def pinned(self, size: int) -> torch.Tensor:
        """Host memory, uint8 [size], with which the device exchanges bytes by itself."""
        return torch.empty(size, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        """Makes host memory that lives as long as this process so, where the driver allows it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues a copy between the device and pinned memory."""
        target.copy_(source)

    def pair(self, store: Store, rank: int, seconds: float) -> Backend:
        """A group of two ends whose sends and receives are enqueued; one that fails ends no process."""
        raise ValueError("a group of a device's memory between ends without a device")


class CudaStreams(Streams):
    """One GPU, by torch.cuda and NCCL."""

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def event(self) -> StreamEvent:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def after(self, event: StreamEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            with contextlib.suppress(RuntimeError):  # the next launch reports the error, and clears it
                self.empty(1).zero_()
            log.warning(
                "CUDA does not register %d bytes of host memory: copies go through pageable memory",
                memory.nbytes,
            )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def pair(self, store: Store, rank: int, seconds: float) -> Backend:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        with torch.cuda.device(self.device), _no_abort():
            return dist.ProcessGroupNCCL(store, rank, 2, options)


@contextlib.contextmanager
def _no_abort() -> Iterator[None]:
    """Around the constructor of a group of NCCL: its watchdog, which by default ends the process when a peer
    has died or an operation has lasted too long, only notes it. Whoever made the group aborts it."""
    with _constructing:
        before = os.environ.get(_NO_ABORT)
        os.environ[_NO_ABORT] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_NO_ABORT]
            else:
                os.environ[_NO_ABORT] = before


KINDS: dict[str, Callable[[torch.device], Streams]] = {"cpu": Streams, "cuda": CudaStreams}


def streams_of(device: torch.device) -> Streams:
    """Returns the streams for a torch device, by its type."""
    return KINDS[device.type](device)
