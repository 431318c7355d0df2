"""Which trajectory goes into which mini-batch, data-parallel rank and micro-batch. Pure functions of lengths
and seeds.

Called by trainer/step/learner.py on every rank with the same batch; all ranks get the same plan and each
takes its own part of it. Guarantees: every trajectory is in exactly one place, no micro-batch exceeds the
token budget, all ranks have the same number of micro-batches.
"""

import random

from laminar_hpc.config.errors import LaminarError


def split_minibatches(count: int, minibatches: int, seed: int, step: int) -> list[list[int]]:
    """Indices 0..count-1, shuffled by (seed, step) alone, in `minibatches` parts whose sizes differ by at
    most one."""
    order = list(range(count))
    random.Random(f"minibatches {seed} {step}").shuffle(order)
    return [order[count * i // minibatches : count * (i + 1) // minibatches] for i in range(minibatches)]


def split_ranks(lengths: list[int], ranks: int) -> list[list[int]]:
    """Positions in `lengths` per data-parallel rank, balanced by tokens: longest first, each to the rank that
    has the fewest tokens so far."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        parts[rank].append(i)
        tokens[rank] += lengths[i]
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
                f"trainer.tokens_per_microbatch={budget}; raise it"
            )
        at = next((p for p, left in enumerate(room) if left >= lengths[i]), len(packs))
        if at == len(packs):
            packs.append([])
            room.append(budget)
        packs[at].append(i)
        room[at] -= lengths[i]
    return packs


def plan_microbatches(
    lengths: list[int], ranks: int, budget: int, multiple: int = 1
) -> list[list[list[int]]]:
    """[rank][micro-batch] -> positions in `lengths`. All ranks have as many, a multiple of `multiple`: those
    that need fewer deal theirs out evenly over all, which are smaller then, or get empty ones at the end."""
    plan = [pack(lengths, members, budget) for members in split_ranks(lengths, ranks)]
    count = max(map(len, plan))
    if multiple == 1:
        return [_filled(packs, count) for packs in plan]
    count += -count % multiple
    return [_filled(_evenly(lengths, packs, count, budget), count) for packs in plan]


def _filled(packs: list[list[int]], count: int) -> list[list[int]]:
    return packs + [[] for _ in range(count - len(packs))]


def _evenly(lengths: list[int], packs: list[list[int]], count: int, budget: int) -> list[list[int]]:
    """The same members in at most `count` packs of about equal tokens, or as they are if one would exceed
    the budget."""
    members = [i for each in packs for i in each]
    dealt = split_ranks([lengths[i] for i in members], count)
    even = [[members[place] for place in part] for part in dealt if part]
    return even if all(sum(lengths[i] for i in part) <= budget for part in even) else packs
