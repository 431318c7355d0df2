"""Whether the engine makes progress: requests run, and neither a token, nor a response, nor its own figures
(running and waiting requests, KV tokens) change. Pure: fed once a second by reporting.py; worker.py replaces
an engine that hangs.

    >>> watch = EngineWatch()
    >>> [watch.look(t, True, t // 2) for t in (0.0, 1.0, 2.0, 30.0)], watch.look(1000.0, True, 15.0)
    ([False, False, False, False], True)
"""

LEAST_SECONDS = 30.0  # a busy machine, a long prefill
FIRST_SECONDS = 120.0  # before the engine's first progress: kernels are compiled
TIMES_SLOWEST = 20.0  # a standstill is so many times the longest time between two signs of progress


class EngineWatch:
    """Watches one life of an engine."""

    def __init__(self) -> None:
        self._signs: object = None
        self._since: float | None = None  # the newest progress, or when it began to be busy
        self._slowest = 0.0
        self._progressed = False

    @property
    def limit(self) -> float:
        """Seconds without progress."""
        least = LEAST_SECONDS if self._progressed else FIRST_SECONDS
        return max(least, TIMES_SLOWEST * self._slowest)

    def standing(self, now: float) -> float:
        """Seconds since the newest sign of progress."""
        return 0.0 if self._since is None else now - self._since

    def look(self, now: float, busy: bool, signs: object) -> bool:
        """Whether it hangs. `busy`: requests are under way, and it was not told to pause."""
        if not busy or self._since is None:
            self._signs = signs
            self._since = now if busy else None
        elif signs != self._signs:
            self._slowest = max(self._slowest, now - self._since)
            self._signs = signs
            self._since = now
            self._progressed = True
        return self.standing(now) > self.limit
