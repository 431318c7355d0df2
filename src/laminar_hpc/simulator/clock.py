"""Simulated time: a heap of calls. Equal times are called in the order in which they were entered, so a seed gives one history."""

import heapq
from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0
        self._heap: list[tuple[float, int, Callable, tuple]] = []
        self._entered = 0
        self.running = True

    def at(self, time: float, call: Callable, *arguments: object) -> None:
        """Calls `call(*arguments)` at `time`, now or later."""
        self._entered += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._entered, call, arguments))

    def after(self, seconds: float, call: Callable, *arguments: object) -> None:
        self.at(self.now + seconds, call, *arguments)

    def run(self) -> None:
        """Until `running` is false or nothing is left."""
        heap = self._heap
        while self.running and heap:
            self.now, _, call, arguments = heapq.heappop(heap)
            self.calls += 1
            call(*arguments)
