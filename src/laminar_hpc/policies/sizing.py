"""How large things should be: splits of GPUs that are worth trying (the simulator or a short run tells which
is best), and the batch that saturates an engine. Pure."""

from collections.abc import Sequence

SLOWER = 1.5  # a decode step of a batch over that of one request at which the engine counts as saturated
_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


def trainer_splits(gpus: int, multiple: int) -> list[int]:
    """Trainer GPUs at every eighth of `gpus`, as multiples of `multiple`, at least one multiple left to
    either side; ascending."""
    splits = {round(gpus * share / multiple) * multiple for share in _SHARES}
    return sorted(n for n in splits if multiple <= n <= gpus - multiple)


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
