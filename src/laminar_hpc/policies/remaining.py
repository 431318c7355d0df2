"""How much longer a response is expected to become, from the lengths of those that have ended. Pure; the live
controller and the simulator use it for repack (policies/repack.py)."""

from bisect import bisect_right
from collections import deque
from itertools import accumulate

_KEPT = 4096  # the newest lengths that count: the policy that draws them changes
_REFRESHED = 64  # lengths after which the sorted copy is made anew


class RemainingLengths:
    """The mean residual life of a run's own lengths.

    Of a response that has g tokens it is E[L - g | L > g] over the newest lengths L. Before any has ended,
    and for one longer than all of them, half of what the maximum leaves.

    >>> lengths = RemainingLengths(100)
    >>> for length in (10, 20, 60):
    ...     lengths.add(length)
    >>> lengths.expected(0), lengths.expected(10), lengths.expected(60)
    (30.0, 30.0, 20.0)
    """

    def __init__(self, longest: int) -> None:
        """`longest`: the maximum number of response tokens."""
        self._longest = longest
        self._newest: deque[int] = deque(maxlen=_KEPT)
        self._unsorted = 0
        self._sorted: list[int] = []
        self._sums: list[int] = [0]  # of the first so many of `_sorted`

    def add(self, length: int) -> None:
        """A response of so many tokens has ended."""
        self._newest.append(length)
        self._unsorted += 1

    def expected(self, generated: float) -> float:
        """Tokens that a response which has `generated` tokens is expected to still get."""
        if self._unsorted >= min(_REFRESHED, len(self._newest)) > 0:
            self._sorted = sorted(self._newest)
            self._sums = [0, *accumulate(self._sorted)]
            self._unsorted = 0
        first = bisect_right(self._sorted, generated)
        if longer := len(self._sorted) - first:
            return (self._sums[-1] - self._sums[first]) / longer - generated
        return max(0.0, (self._longest - generated) / 2)
