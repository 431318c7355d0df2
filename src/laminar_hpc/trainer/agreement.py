"""What the trainer ranks agree on around a checkpoint: texts of any length, and that all are there.

Used by trainer/checkpoint.py. Collective: every rank of the trainer world makes the same calls in the same
order. Every wait is bounded.
"""

from datetime import timedelta

import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.control import all_frames, control_group


class Agreement:
    """`seconds` bounds each wait for the other ranks."""

    def __init__(self, seconds: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.seconds = seconds

    def gather(self, text: str) -> list[str]:
        """What each rank says, in the order of the ranks."""
        return [each.decode() for each in all_frames(text.encode(), self.seconds, "a checkpoint")]

    def first(self, text: str) -> str:
        """The first text that is not empty, the same on all ranks; "" if all are."""
        return next(filter(None, self.gather(text)), "")

    def meet(self, what: str) -> None:
        """Returns when all ranks are there. Raises LaminarError that names those who are not."""
        limit = timedelta(seconds=self.seconds)
        try:
            dist.monitored_barrier(control_group(), timeout=limit, wait_all_ranks=True)
        except RuntimeError as error:
            raise LaminarError(
                f"trainer {self.rank} waited {limit.seconds} s for the other trainer ranks at "
                f"{what}: {str(error).splitlines()[0]}"
            ) from None
