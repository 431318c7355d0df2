"""How long an orderly stop takes: the step under way, a checkpoint, and the goodbyes. Pure.

What was slow before may be slow again, so the longest of the last ones counts, and half as much again.
"""

from collections.abc import Sequence

SAFETY = 1.5  # over the longest that was measured
GOODBYE_SECONDS = 60.0  # for all to leave, an engine that is just starting too
_NEWEST = 20  # of the steps and saves, as an early one may have compiled kernels


def stop_seconds(steps: Sequence[float], saves: Sequence[float]) -> float:
    """Seconds from the request to the end, by those of earlier steps and checkpoints."""
    return (
        SAFETY * (max(steps[-_NEWEST:], default=0.0) + max(saves[-_NEWEST:], default=0.0)) + GOODBYE_SECONDS
    )


def stop_limit(steps: Sequence[float], saves: Sequence[float], at_least: float, unmeasured: float) -> float:
    """Seconds after which a stop that is not done has failed: twice what is expected, and never less than
    `at_least`; before the first checkpoint not less than `unmeasured` either, as nobody knows how long one
    takes."""
    return max(2 * stop_seconds(steps, saves), at_least, 0.0 if saves else unmeasured)
