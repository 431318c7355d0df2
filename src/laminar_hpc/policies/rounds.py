"""Rounds of a barrier (refresh=barrier): all replicas begin together, on the newest weights. A small state
machine without a clock.

A round opens when every replica is idle on the newest weights that were published; each replica then takes
one local batch of it, when admission lets it. With max_staleness=0 the trainer and the replicas take turns;
with 1 the next round overlaps with training.
"""

from collections.abc import Iterable


class Rounds:
    """`replicas`: how many there are to be.

    >>> rounds = Rounds(2)
    >>> rounds.may_begin(0, {0: 5}, newest=5), rounds.may_begin(0, {0: 5, 1: 5}, newest=5)
    (False, True)
    >>> rounds.took(0); rounds.may_begin(0, {0: 5}, newest=5), rounds.may_begin(1, {1: 5}, newest=5)
    (False, True)
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._open: set[int] = set()  # replicas that may still take their batch of this round

    def may_begin(self, replica: int, idle: dict[int, int], newest: int) -> bool:
        """`idle`: the weight id that each idle replica serves; `newest`: the id that was published last."""
        if len(idle) >= self._replicas and all(weight_id == newest for weight_id in idle.values()):
            self._open = set(idle)
        return replica in self._open

    def took(self, replica: int) -> None:
        self._open.discard(replica)

    def leave(self, replicas: Iterable[int]) -> None:
        """They have died or left; the round waits for their return before the next one opens."""
        self._open.difference_update(replicas)
