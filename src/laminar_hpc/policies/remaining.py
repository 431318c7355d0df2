"""How much longer a response is expected to become, from the lengths of those that have ended. Pure; the live
controller and the simulator use it for repack (policies/repack.py)."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
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
        self._sorted: list[float] = []  # floats compare with floats in less time
        self._means: list[float] = []  # of each of `_sorted` and all that are longer

    def add(self, length: int) -> None:
        """A response of so many tokens has ended."""
        self._newest.append(length)
        self._unsorted += 1

    def extend(self, lengths: list[int]) -> None:
        """Responses of so many tokens have ended, in this order."""
        self._newest.extend(lengths)
        self._unsorted += len(lengths)

    def expected(self, generated: float) -> float:
        """Tokens that a response which has `generated` tokens is expected to still get."""
        return self.expected_each((generated,))[0]

    def expected_each(self, generated: Iterable[float]) -> list[float]:
        """`expected` of each of these responses."""
        if self._unsorted >= min(_REFRESHED, len(self._newest)) > 0:
            self._sorted = sorted(map(float, self._newest))
            sums = accumulate(reversed(self._sorted))
            self._means = [total / count for count, total in enumerate(sums, 1)][::-1]
            self._unsorted = 0
        lengths, means = self._sorted, self._means
        known, longest = len(lengths), self._longest
        return [
            means[first] - tokens
            if (first := bisect_right(lengths, tokens)) < known
            else max(0.0, (longest - tokens) / 2)
            for tokens in generated
        ]
