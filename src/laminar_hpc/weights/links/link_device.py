"""The part of a link that lies on a device: a group of NCCL with a stream of its own, and the memory that
chunks pass through.

Its own stream, because whoever makes or uses a link may have a current stream that trains, or that another
link waits on. Used by links.py, whose errors it leaves to say whom the link was to.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work

from laminar_hpc.weights.links.staging import RECEIVING, SENDING, Staging
from laminar_hpc.weights.links.streams import StreamEvent, Streams, until


class DeviceEnd:
    """One thread uses it, any other may `abort` it. Raises RuntimeError for whatever goes wrong."""

    def __init__(self, streams: Streams, store: Store, me: int, seconds: float) -> None:
        """`me`: 0 for the sender, 1 for the receiver."""
        self._streams = streams
        self._me = me
        self._other = 1 - me
        self._aborted = False
        self._stream = streams.stream()
        self._pair = streams.pair(store, me, seconds)
        self._staging: Staging | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor goes over this part of the link."""
        return self._streams.holds(tensor)

    def ordered(self) -> AbstractContextManager[object]:
        """What is enqueued in the block goes to the link's stream."""
        return self._streams.on(self._stream)

    def memory(self, size: int) -> torch.Tensor:
        """Takes uint8 [size] of the device's memory."""
        with self.ordered():
            return self._streams.empty(size)

    def staging(self, size: int) -> Staging:
        """What chunks of at most `size` bytes pass through; the same ones for the link's life."""
        if self._staging is None or self._staging.size < size:
            with self.ordered():
                self._staging = Staging(self._streams, size, RECEIVING if self._me else SENDING)
        return self._staging

    def start(self, sends: bool, tensor: torch.Tensor) -> Work:
        """Enqueues one end of a chunk's way, behind what the caller has enqueued to its own stream."""
        filled = self._streams.event()
        with self.ordered():
            self._streams.after(filled)
            pair: Any = self._pair  # torch's stub leaves out what is used
            return (pair.send if sends else pair.recv)([tensor], self._other, 0)

    def finish(self, work: Work, limit: float) -> None:
        """Until it is done. `wait` of the work only orders a stream behind it, and raises what has ended
        it."""
        until(work.is_completed, limit, "what was enqueued", self._given_up)
        with self.ordered():
            work.wait()
        if self._aborted:  # what was aborted is completed as well
            raise RuntimeError("it was closed")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> StreamEvent:
        """Enqueues a copy between the device and pinned memory, behind what this link was given before; the
        event is reached when it is done."""
        with self.ordered():
            self._streams.copy(target, source)
            return self._streams.event()

    def reach(self, event: StreamEvent, limit: float) -> None:
        """Waits until an event of `copy`."""
        until(event.query, limit, "a copy from the device", self._given_up)

    def abort(self) -> None:
        """NCCL's kernels leave the device; there is no watchdog that would end them."""
        self._aborted = True
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._pair.abort()

    def _given_up(self) -> bool:
        return self._aborted
