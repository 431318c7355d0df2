"""When a replica far from the controller asks for its next local batch, so that the answer is there when it
has drained, by the local batch before. Used by rollout/asking.py.

Invariant: somebody is left, so it still generates, and never all; and it is no more than EARLY times as early
as MARGIN and SHARE want it.

    >>> left_when_due([1.0, 2.4, 2.95, 3.0], 0.2), left_when_due([1.0, 1.7, 2.95, 3.0], 0.2)
    (2, 1)
"""

from collections.abc import Sequence

# the shortest time that an answer took, and a share of the local batch, as the ends of trajectories come in
# bursts; where that is a lull, at most so many times as early: the answer may bring older weights
MARGIN, SHARE, EARLY = 1.5, 0.1, 2.0


def wanted(ends: Sequence[float], answer: float) -> float:
    """Seconds before the last end."""
    return MARGIN * answer + SHARE * (ends[-1] - ends[0])


def left_when_due(ends: Sequence[float], answer: float) -> int:
    """`ends`: when the trajectories of a local batch had their last token, ascending; `answer`: seconds. How
    many were left when it was time to ask for the next one; 0 where that cannot be told."""
    if not ends:
        return 0
    seconds = wanted(ends, answer)
    left = sum(end > ends[-1] - seconds for end in ends)
    is_near = left < len(ends) and ends[-1] - ends[-1 - left] <= EARLY * seconds
    return left if is_near else left - 1
