"""When a replica asks for its next local batch: when it has drained; at another place a round trip before, so
that the answer is there by then. The grant is on the newest weights of the moment when it asks, and brings
the replica to load them. Owned by worker.py.
"""

import math
import time
from collections.abc import Callable

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.rollouts import RequestWork
from laminar_hpc.policies.ask_ahead import left_when_due
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.grants import Grants


def asks_ahead(config: RunConfig) -> bool:
    """Whether a grant may come on newer weights than are open, to a replica that is still draining."""
    return bool(config.cluster.place) and config.pipeline.refresh == "drained"


class Asking:
    """`newest`: the newest weight id in the slots."""

    def __init__(self, batch: LocalBatch, grants: Grants, newest: Callable[[], int | None]) -> None:
        self._batch = batch
        self._grants = grants
        self._newest = newest
        self._is_ahead = asks_ahead(batch.config)
        self._asked: float | None = None  # when the first request left that no grant has followed
        self._shortest = math.inf  # seconds from a request to its grant
        self._ends: list[float] = []  # of this local batch
        self._left = 0  # so many are left of it when it is due to ask

    def ask(self, weight_id: int, ahead: bool = False) -> None:
        """For a local batch on these weights."""
        if self._asked is None:
            self._asked = time.monotonic()
        self._batch.context.channel.send(RequestWork(weight_id, self._grants.newest_batch, ahead=ahead))

    def granted(self) -> None:
        """Whichever of the requests it answers, the first one is no younger."""
        if self._asked is not None:
            self._shortest = min(self._shortest, time.monotonic() - self._asked)
            self._asked = None

    def ended(self) -> None:
        """A trajectory of the local batch has its last token."""
        if not self._is_ahead:
            return
        self._ends.append(time.monotonic())
        if self._batch.state.in_flight != self._left or not self._left:
            return
        served, newest = self._batch.state.weight_id, self._newest()
        if not self._grants and served is not None:
            self.ask(served if newest is None else max(served, newest), ahead=True)

    def drained(self) -> None:
        self._left = left_when_due(self._ends, self._shortest)
        self._ends.clear()
