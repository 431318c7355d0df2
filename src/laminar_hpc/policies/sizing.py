"""The batch that saturates an engine. Pure."""

from collections.abc import Sequence

SLOWER = 1.5  # a decode step of a batch over that of one request at which the engine counts as saturated


def saturation_requests(curve: Sequence[tuple[int, float]]) -> int:
    """B of repack from a measured decode curve, (requests, seconds per decode step) with ascending requests:
    the maximum number of requests at which a step takes at most SLOWER times as long as with one, by linear
    interpolation; beyond, more requests make each one slower."""
    limit, (before, fast) = SLOWER * curve[0][1], curve[0]
    for requests, seconds in curve[1:]:
        if seconds > limit:
            return before + int((requests - before) * (limit - fast) / (seconds - fast))
        before, fast = requests, seconds
    return before
