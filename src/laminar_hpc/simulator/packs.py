"""Micro-batches that are packs of whole trajectories, as those of published recipes, and how long a pass over
them takes."""

from bisect import bisect_left, insort


def packed(tokens: list[int], room: int, ranks: int) -> list[tuple[int, int]]:
    """Tokens and squared tokens of each pack: the longest trajectories first, each into the fullest pack that
    has room for it, of `room` tokens. As many packs for each of `ranks`; the last ones may be empty."""
    packs: list[tuple[int, int]] = []
    free: list[tuple[int, int]] = []  # (room that is left, pack), in order
    for n in sorted(tokens, reverse=True):
        at = bisect_left(free, (n, 0))
        left, index = free.pop(at) if at < len(free) else (room, len(packs))
        if index == len(packs):
            packs.append((0, 0))
        packs[index] = packs[index][0] + n, packs[index][1] + n * n
        insort(free, (left - n, index))
    return packs + [(0, 0)] * (-len(packs) % ranks)


def pass_seconds(
    tokens: list[int],
    room: int,
    ranks: int,
    stages: int,
    token: float,
    attention: float,
    microbatch: float,
) -> float:
    """Seconds until the slowest rank is through its packs: `token` for each token, `attention` for each
    squared token of a trajectory, `microbatch` for each pack. A pipeline's buffers have one size, so its
    packs are filled up to the fullest; m of them through p stages take (m + p - 1) / m times as long."""
    packs = packed(tokens, room, ranks)
    size = max(total for total, _ in packs)
    each = len(packs) // ranks
    seconds = [
        sum(
            (size if stages > 1 else total) * token + squares * attention
            for total, squares in packs[rank::ranks]
        )
        for rank in range(ranks)
    ]
    return (max(seconds) + each * microbatch) * (1.0 + (stages - 1) / each)
