"""What a trainer rank tells the controller of its progress, with each ping: so that a rank which is stuck is
told from one that takes its time (controller/fleet/trainer_generation.py).

Called by the trainer's thread in trainer/loop.py, trainer/inbox.py and for every micro-batch.
"""

from typing import Literal

from laminar_hpc.line.channel import Channel
from laminar_hpc.line.messages.membership import TrainerProgress

Phase = Literal["load", "wait", "train", "publish", "checkpoint"]


class Progress:
    """Every call is a sign of progress."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._count = 0
        self._phase: Phase = "load"
        self._has_trained = False
        self.advance()

    def enter(self, phase: Phase) -> None:
        """This rank does something else from here on. Its first step still counts as loading: kernels are
        compiled and groups of ranks meet then, whatever a step takes later."""
        self._phase = "load" if phase == "train" and not self._has_trained else phase
        self.advance()

    def has_trained(self) -> None:
        """A step is done."""
        self._has_trained = True

    def advance(self) -> None:
        """One more part of what it does is done."""
        self._count += 1
        self._channel.tell_progress(TrainerProgress(self._phase, self._count))
