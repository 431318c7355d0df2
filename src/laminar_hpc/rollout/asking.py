"""When a replica asks for its next local batch: when it has drained; at another place a round trip before, so
that the answer is there by then. The grant is on the newest weights of the moment when it asks, and brings
the replica to load them. Owned by worker.py.
"""

import math
import time
from collections.abc import Callable, Sequence

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.rollouts import RequestWork
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.grants import Grants

# the shortest time that an answer took, and a share of the local batch, as the ends of trajectories come in
# bursts; where that is a lull, at most so many times as early: the answer may bring older weights
_MARGIN, _SHARE, _EARLY = 1.5, 0.1, 2.0


def asks_ahead(config: RunConfig) -> bool:
    """Whether a grant may come on newer weights than are open, to a replica that is still draining."""
    return bool(config.cluster.place) and config.pipeline.refresh == "drained"


def left_when_due(ends: Sequence[float], answer: float) -> int:
    """`ends`: when the trajectories of a local batch had their last token, ascending; `answer`: seconds. How
    many were left when it was time to ask for the next one.

    >>> left_when_due([1.0, 2.4, 2.95, 3.0], 0.2), left_when_due([1.0, 1.7, 2.95, 3.0], 0.2)
    (2, 1)
    """
    if not ends:
        return 0
    seconds = _MARGIN * answer + _SHARE * (ends[-1] - ends[0])
    left = sum(end > ends[-1] - seconds for end in ends)
    is_near = left < len(ends) and ends[-1] - ends[-1 - left] <= _EARLY * seconds
    return left if is_near else left - 1


class Asking:
    """`newest`: the newest weight id in the slots."""

    def __init__(self, batch: LocalBatch, grants: Grants, newest: Callable[[], int | None]) -> None:
        self._batch = batch
        self._grants = grants
        self._newest = newest
        self._is_ahead = asks_ahead(batch.config)
        self._asked = math.inf  # when the newest request left
        self._shortest = math.inf  # seconds from a request to its grant
        self._ends: list[float] = []  # of this local batch
        self._left = 0  # so many are left of it when it is due to ask

    def ask(self, weight_id: int, ahead: bool = False) -> None:
        """For a local batch on these weights."""
        self._asked = time.monotonic()
        self._batch.context.channel.send(RequestWork(weight_id, self._grants.newest_batch, ahead=ahead))

    def granted(self) -> None:
        self._shortest = min(self._shortest, max(0.0, time.monotonic() - self._asked))
        self._asked = math.inf

    def ended(self) -> None:
        """A trajectory of the local batch has its last token."""
        self._ends.append(time.monotonic())
        if not self._is_ahead or self._batch.state.in_flight != self._left or not self._left:
            return
        served, newest = self._batch.state.weight_id, self._newest()
        if not self._grants and served is not None:
            self.ask(served if newest is None else max(served, newest), ahead=True)

    def drained(self) -> None:
        self._left = left_when_due(self._ends, self._shortest)
        self._ends.clear()
