"""Copies of a rank's state in host memory, from which a checkpoint is written while training goes on.

Used by trainer/checkpoint.py. The buffers are kept from one checkpoint to the next: fresh memory costs more
time than the copy, above all memory that a GPU copies into. They hold what this rank writes, never more.
"""

from collections.abc import Sequence

import torch

from laminar_hpc.cluster.host_memory import usable_memory

_SHARE = 0.8  # of the free memory that copies may take


class HostCopies:
    """`ranks_here`: trainer ranks of this machine, which share its memory."""

    def __init__(self, ranks_here: int) -> None:
        self._ranks_here = ranks_here
        self._kept: dict[str, torch.Tensor] = {}

    def have_room(self, nbytes: int) -> bool:
        """Whether all ranks of this machine may hold copies of so many bytes, counting those kept."""
        missing = nbytes - sum(buffer.nbytes for buffer in self._kept.values())
        return missing * self._ranks_here <= _SHARE * usable_memory()

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for the tensor that is called `name` here; what it held before is gone. Page-locked
        where there is a GPU."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != torch.Size(shape) or kept.dtype is not dtype:
            kept = torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())
            self._kept[name] = kept
        return kept

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`; from a GPU it is there after the device's next synchronization."""
        return self.buffer(name, tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)
