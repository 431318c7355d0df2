"""How long a call may take before it counts as late, and as hung, from what others of its kind took. Pure.

    late    longer than the 99th percentile: the same may be asked of another, if that does no harm
    hung    FACTOR times as long: it is given up

Until FEWEST calls have ended nothing is late, and hung is what takes longer than `cap`. A call that was given
up counts as one of twice its time, so a deadline that cuts off more than one call in a hundred rises until it
does not.
"""

from collections import deque
from itertools import islice

FEWEST = 100  # calls that say what the 99th percentile is
KEPT = 1000  # newest calls that are looked at
FACTOR = 10.0
LATE_SECONDS, HUNG_SECONDS = 1.0, 5.0  # never less than these: a machine may be busy for a moment
_EVERY = 20  # calls after which the percentile is taken anew


class Deadline:
    """Of one kind of call. `cap`: seconds after which any is given up."""

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._took: deque[float] = deque(maxlen=KEPT)
        self._new = 0
        self._p99 = 0.0

    def took(self, seconds: float) -> None:
        """A call has ended."""
        self._took.append(seconds)
        self._new += 1

    def given_up(self, after: float) -> None:
        """A call has not ended in so many seconds."""
        self.took(2 * after)

    @property
    def late(self) -> float | None:
        """Seconds; None: not known yet, or not before it is given up."""
        p99 = self._percentile()
        return None if p99 is None or (late := max(LATE_SECONDS, p99)) >= self.cap else late

    def limit(self, patient: bool) -> float:
        """Seconds after which a call is given up: a patient one not before `cap`."""
        return self.cap if patient else self.hung

    @property
    def hung(self) -> float:
        """Seconds."""
        p99 = self._percentile()
        return self.cap if p99 is None else min(self.cap, max(HUNG_SECONDS, FACTOR * p99))

    def _percentile(self) -> float | None:
        if len(self._took) < FEWEST:
            return None
        if self._new >= _EVERY:
            place = -(-len(self._took) * 99 // 100) - 1  # the nearest rank
            self._p99 = next(islice(sorted(self._took), place, None))
            self._new = 0
        return self._p99
