"""Simulated time: a heap of calls. Equal times are called in the order in which they were entered, so a seed
gives one history.

Every simulation ends: `progress` is called when a trajectory or a trainer step is finished, and PATIENCE
calls without one are too many.
"""

import heapq
from collections.abc import Callable

from laminar_hpc.config.errors import LaminarError

PATIENCE = 300_000  # a few seconds; even of a million requests in flight some are finished by then
FINISHED = 40_000_000  # trajectories, twice what a run may train


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0
        self._heap: list[tuple[float, int, Callable, tuple]] = []
        self._entered = 0
        self.running = True
        self.finished = 0
        self._limit = PATIENCE

    def progress(self, finished: int = 0) -> None:
        """Raises LaminarError when `finished` trajectories add up to more than any useful run has."""
        self._limit = self.calls + PATIENCE
        self.finished += finished
        if self.finished > FINISHED:
            raise LaminarError(
                f"simulation: {self.finished:,} trajectories after {self.now / 3600:,.1f} simulated hours, "
                "far more than are trained: give "
                "the trainer more GPUs, bound max_staleness, or simulate fewer steps"
            )

    def charge(self, calls: int) -> None:
        """Counts a call that costs as much as `calls` others."""
        self._limit -= calls

    def at(self, time: float, call: Callable, *arguments: object) -> None:
        """Calls `call(*arguments)` at `time`, now or later."""
        self._entered += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._entered, call, arguments))

    def after(self, seconds: float, call: Callable, *arguments: object) -> None:
        self.at(self.now + seconds, call, *arguments)

    def run(self) -> None:
        """Makes the calls in order until `running` is false. Raises LaminarError when nothing is finished."""
        heap = self._heap
        while self.running and heap:
            self.now, _, call, arguments = heapq.heappop(heap)
            self.calls += 1
            if self.calls > self._limit:
                raise LaminarError(
                    f"simulation: stuck after {self.now / 3600:,.1f} simulated hours, nothing is finished "
                    "any more: failures that come faster than work is done, or replicas that get none; "
                    "raise *mtbf_hours, max_staleness or the number of GPUs"
                )
            call(*arguments)
