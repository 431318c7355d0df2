"""How long the holder of a lock (machine/locks/run_lock.py) may be sure that it still has it.

Others succeed a holder on another machine whose lock they have seen unchanged for `stale_after` seconds of
their own clock. So the holder is sure for LEASE_SHARE of that time, from the beginning of its last renewal on
its own clock: all who succeed it begin to count after that. Nobody's wall clock is asked. The rates of two
machines' clocks may differ by a quarter, and only those: a process or a machine that stands still wakes up
unsure.

A lock that was taken slowly, in more than that time, may have been succeeded half-way, and its file may have
replaced that of the one after: whoever has it is sure when that one has certainly noticed.
"""

import time
from collections.abc import Callable

LEASE_SHARE = 0.75
Clock = Callable[[], float]


def boot_time() -> float:
    """Seconds since the machine's start, those of its sleep too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Used by the thread that renews the lock; others ask whether it `is_sure`."""

    def __init__(self, stale_after: float, clock: Clock = boot_time) -> None:
        self._stale_after = stale_after
        self._clock = clock
        self._sure_from = self._sure_until = -1.0

    @property
    def is_sure(self) -> bool:
        """Whether the lock is certainly held at this moment."""
        return self._sure_from <= self._clock() < self._sure_until

    @property
    def has_run_out(self) -> bool:
        """Whether others may have succeeded the holder, so that it has to take the lock again."""
        return self._clock() >= self._sure_until

    def begin(self) -> float:
        """The time that is given to `taken` or `renewed` when it is done."""
        return self._clock()

    def taken(self, begun: float) -> None:
        now, seconds = self._clock(), LEASE_SHARE * self._stale_after
        if now - begun >= seconds:
            self._sure_from = now + self._stale_after
        self._sure_until = begun + seconds

    def renewed(self, begun: float) -> None:
        """A renewal that ends too late counts for nothing."""
        if not self.has_run_out:
            self._sure_until = begun + LEASE_SHARE * self._stale_after
