"""Which trajectory goes into which mini-batch, data-parallel rank and micro-batch. Pure functions of lengths
and seeds.

Called by trainer/step/learner.py on every rank with the same batch; all ranks get the same plan and each
takes its own part of it. Guarantees: every trajectory is in exactly one place, no micro-batch exceeds the
token budget, all ranks have the same number of micro-batches.

Ranks are balanced by their work, since all wait for the slowest at the end of a mini-batch; a rank's
micro-batches are balanced by their tokens, since pipeline stages fill them up to the largest.
"""

import math
import random
from collections.abc import Sequence

from laminar_hpc.config.errors import LaminarError


def work(length: int, even: float) -> float:
    """Operations of a sequence, in those of a token without its attention; `even`: the length at which
    attention takes as many as all else, config/models.py `even_tokens`."""
    return length + length * length / even


def split_minibatches(count: int, minibatches: int, seed: int, step: int) -> list[list[int]]:
    """Indices 0..count-1, shuffled by (seed, step) alone, in `minibatches` parts whose sizes differ by at
    most one."""
    order = list(range(count))
    random.Random(f"minibatches {seed} {step}").shuffle(order)
    return [order[count * i // minibatches : count * (i + 1) // minibatches] for i in range(minibatches)]


def split_ranks(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Positions in `work` per data-parallel rank: the most work first, each to the rank that has the least so
    far."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    so_far = [0.0] * ranks
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        rank = min(range(ranks), key=lambda r: (so_far[r], r))
        parts[rank].append(i)
        so_far[rank] += work[i]
    return parts


def pack(lengths: list[int], members: list[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: `members` (positions in `lengths`) in as few packs of at most `budget` tokens as
    that finds."""
    packs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(members, key=lambda i: (-lengths[i], i)):
        if lengths[i] > budget:
            raise LaminarError(
                f"a trajectory of {lengths[i]} tokens exceeds "
                f"trainer.context_parallel x tokens_per_microbatch={budget}; raise it"
            )
        at = next((p for p, left in enumerate(room) if left >= lengths[i]), len(packs))
        if at == len(packs):
            packs.append([])
            room.append(budget)
        packs[at].append(i)
        room[at] -= lengths[i]
    return packs


def spread(lengths: list[int], members: list[int], budget: int, packs: int) -> list[list[int]]:
    """`members` in so many packs of about equally many tokens, none above `budget`; where this finds none,
    those of `pack`. The last ones may be empty."""
    even = [[members[at] for at in part] for part in split_ranks([lengths[i] for i in members], packs)]
    if max(sum(lengths[i] for i in part) for part in even) <= budget:
        return even
    fewest = pack(lengths, members, budget)
    return fewest + [[] for _ in range(packs - len(fewest))]


def plan_microbatches(
    lengths: list[int], ranks: int, budget: int, even: float = math.inf, multiple: int = 1
) -> list[list[list[int]]]:
    """[rank][micro-batch] -> positions in `lengths`; `even` as in `work`. As many micro-batches on every rank
    as the rank needs that needs most, and a multiple of `multiple`; a rank with fewer trajectories gets
    empty ones at the end."""
    of_ranks = split_ranks([work(n, even) for n in lengths], ranks)
    packs = max(len(pack(lengths, members, budget)) for members in of_ranks)
    packs += -packs % multiple
    return [spread(lengths, members, budget, packs) for members in of_ranks]
