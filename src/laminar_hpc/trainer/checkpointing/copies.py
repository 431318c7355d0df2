"""Copies of a rank's state in host memory, from which a checkpoint is written while training goes on.

Used by trainer/checkpoint.py. The buffers are kept from one checkpoint to the next, and are made before the
first one by a thread beside the training: fresh memory costs many times what the copy does, above all memory
that a GPU copies into. They hold what this rank writes, never more.
"""

import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch

from laminar_hpc.machine.host_memory import usable_memory

_SHARE = 0.8  # of the free memory that copies may take


class Wanted(NamedTuple):
    """A buffer by its name in this rank's copies."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HostCopies:
    """`ranks_here`: trainer ranks of this machine, which share its memory."""

    def __init__(self, ranks_here: int) -> None:
        self._ranks_here = ranks_here
        self._kept: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def have_room(self, wanted: Sequence[Wanted]) -> bool:
        """Whether all ranks of this machine may hold such copies, counting those kept."""
        self._join()
        missing = sum(each.nbytes for each in wanted) - sum(kept.nbytes for kept in self._kept.values())
        return missing * self._ranks_here <= _SHARE * usable_memory()

    def make(self, wanted: Iterable[Wanted]) -> None:
        """Lets a thread make the buffers and touch their memory; whoever needs one of them waits for it."""
        self._join()
        here = torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_available() else nullcontext()

        def run() -> None:
            with suppress(RuntimeError), here:  # what cannot be had is said where it is needed
                for each in wanted:
                    if self._stopped.is_set():
                        return
                    self._buffer(each).zero_()

        self._thread = threading.Thread(target=run, name="checkpoint buffers", daemon=True)
        self._thread.start()

    def buffer(self, wanted: Wanted) -> torch.Tensor:
        """Host memory for it; what that held before is gone. Page-locked where there is a GPU."""
        self._join()
        return self._buffer(wanted)

    def copy(self, wanted: Wanted, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`; from a GPU it is there after the device's next synchronization."""
        return self.buffer(wanted).copy_(tensor.detach(), non_blocking=True)

    def close(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._join()

    def _buffer(self, wanted: Wanted) -> torch.Tensor:
        kept = self._kept.get(wanted.name)
        if kept is None or kept.shape != torch.Size(wanted.shape) or kept.dtype is not wanted.dtype:
            kept = torch.empty(wanted.shape, dtype=wanted.dtype, pin_memory=torch.cuda.is_available())
            self._kept[wanted.name] = kept
        return kept

    def _join(self) -> None:
        thread = self._thread
        self._thread = None
        if thread is not None:
            thread.join()
