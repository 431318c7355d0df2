"""Rounds of a barrier (refresh=barrier): all replicas begin together, on the newest weights. A small state
machine without a clock.

A round opens when every replica is idle on the newest weights that were published; each replica then takes
one local batch of it, when admission lets it. With max_staleness=0 the trainer and the replicas take turns;
with 1 the next round overlaps with training.
"""

from collections.abc import Collection, Iterable, Mapping


class Rounds:
    """Replicas come and go: a round is opened by those that are there then.

    >>> rounds = Rounds()
    >>> rounds.look({0: 5}, 5, {0, 1}); rounds.may_begin(0)
    False
    >>> rounds.look({0: 5, 1: 5}, 5, {0, 1}); rounds.may_begin(0), rounds.may_begin(1)
    (True, True)
    >>> rounds.took(0); rounds.look({1: 5}, 5, {0, 1}); rounds.may_begin(0), rounds.may_begin(1)
    (False, True)
    """

    def __init__(self) -> None:
        self._open: set[int] = set()  # replicas that may still take their batch of this round

    @property
    def is_open(self) -> bool:
        """For anybody."""
        return bool(self._open)

    def look(
        self, idle: Mapping[int, int | None], newest: int, crew: Collection[int], minimum: int = 1
    ) -> None:
        """Opens the next round if all are ready for it. `idle`: the weight id that each idle replica serves;
        `newest`: the id that was published last; `crew`: the replicas that a round waits for, of which there
        must be `minimum`. O(crew); to be called when any of these has changed."""
        if len(crew) >= minimum and all(idle.get(each) == newest for each in crew):
            self._open = {each for each, weight_id in idle.items() if weight_id == newest}

    def may_begin(self, replica: int) -> bool:
        return replica in self._open

    def took(self, replica: int) -> None:
        self._open.discard(replica)

    def leave(self, replicas: Iterable[int]) -> None:
        """They have died or left."""
        self._open.difference_update(replicas)
