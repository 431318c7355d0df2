"""What the trainer ranks tell each other beside the tensors: texts of any length, and that all are there.

Used by trainer/checkpoint.py. Collective: every rank of the trainer world makes the same calls in the same
order. Every wait is bounded.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError


class Agreement:
    """Over a gloo group of its own."""

    def __init__(self, seconds: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout = timedelta(seconds=seconds)
        self.group = dist.new_group(backend="gloo", timeout=self._timeout)

    def gather(self, text: str) -> list[str]:
        """What each rank says, in the order of the ranks."""
        mine = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.group)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        said = zip(parts, sizes, strict=True)
        return [part[: int(size) - 1].numpy().tobytes().decode() for part, size in said]

    def first(self, text: str) -> str:
        """The first text that is not empty, the same on all ranks; "" if all are."""
        return next(filter(None, self.gather(text)), "")

    def meet(self, what: str) -> None:
        """Returns when all ranks are there. Raises LaminarError that names those who are not."""
        try:
            dist.monitored_barrier(self.group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise LaminarError(
                f"trainer {self.rank} waited {self._timeout.seconds} s for the other trainer ranks at "
                f"{what}: {str(error).splitlines()[0]}"
            ) from None
