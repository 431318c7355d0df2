"""Slices and short messages between the trainer ranks that hold slices of the canonical tensors, over a gloo
group of their own; slices through host memory (host_passing.py).

Used by trainer/canonical/gather.py. One for checkpoints, in the trainer's thread, and one for publishing, in
a thread beside it: collectives of two threads on one group would come in no fixed order. Every wait is
bounded, and names the rank that did not come.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.canonical.host_passing import HostPassing


def bounded(operation: Callable[[], object], peer: int, what: str, seconds: float) -> None:
    """Raises LaminarError that names `peer` when the operation fails; its group ends it after `seconds`."""
    try:
        operation()
    except (dist.DistError, RuntimeError) as error:
        raise LaminarError(
            f"trainer {dist.get_rank()} waited at most {seconds:.0f} s for trainer {peer} "
            f"to pass {what} along ({str(error).splitlines()[0][:120]}); see that rank's log"
        ) from None


class Exchange:
    """Making one is collective over the trainer world."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        """`ranks`, with rank 0, take part; `seconds` bounds each wait for one of them."""
        self.ranks = list(ranks)
        self._seconds = seconds
        if len(self.ranks) == 1:  # nobody to speak with, and a gloo group costs three threads
            return
        limit = timedelta(seconds=seconds)
        self._words = dist.new_group(self.ranks, backend="gloo", timeout=limit)
        self._slices = HostPassing(self._words, seconds)

    def send(self, tensor: torch.Tensor, peer: int, what: str) -> None:
        """On return the contiguous `tensor` has been read."""
        self._bounded(lambda: self._slices.send(tensor, peer), peer, what)

    def receive(self, tensor: torch.Tensor, peer: int, what: str) -> torch.Tensor:
        """On return the contiguous `tensor` is here."""
        self._bounded(lambda: self._slices.receive(tensor, peer), peer, what)
        return tensor

    def from_first(self, values: Sequence[int]) -> list[int]:
        """Rank 0's `values` on all ranks, which bring as many."""
        if len(self.ranks) == 1:
            return list(values)
        box = torch.tensor(values, dtype=torch.long)
        self._bounded(lambda: dist.broadcast(box, 0, group=self._words), 0, "a command")
        return box.tolist()

    def all_say(self, values: Sequence[int]) -> list[list[int]]:
        """What each rank brought, in the order of `ranks`; as many values of all."""
        if len(self.ranks) == 1:
            return [list(values)]
        said = [torch.zeros(len(values), dtype=torch.long) for _ in self.ranks]
        self._bounded(
            lambda: dist.all_gather(said, torch.tensor(values, dtype=torch.long), group=self._words),
            0,
            "its state",
        )
        return [each.tolist() for each in said]

    def _bounded(self, operation: Callable[[], object], peer: int, what: str) -> None:
        bounded(operation, peer, what, self._seconds)
