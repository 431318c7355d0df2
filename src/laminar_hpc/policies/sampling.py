"""Which prompts, and how many samples of each. Pure; live system and simulator use it.

The order of prompts is a function of seed and count, so that a resumed run goes on where it was; no row twice
in a pass. Samples are all drawn at once, or adaptively as in AERO (arXiv 2602.14338): a few first, then more
at a time while all of the group are wrong.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, number_of_pass: int, shuffle: bool) -> list[int]:
    order = list(range(rows))
    if shuffle:
        random.Random(f"{seed}:{number_of_pass}").shuffle(order)
    return order


def prompt_index(draw: int, rows: int, seed: int, shuffle: bool) -> int:
    """Row of the `draw`-th prompt of the run (from 0) in a file of `rows` rows."""
    number_of_pass, position = divmod(draw, rows)
    return _order(rows, seed, number_of_pass, shuffle)[position]


def worth_a_batch(groups_ready: float, local_batch_groups: int, being_scored: bool) -> bool:
    """Whether an idle replica should start on what is ready for it. While its last local batch is being
    scored, filtering and later rounds may make more ready any moment; less than half a batch waits for that,
    since a small batch takes about as long as a large one."""
    return groups_ready > 0 and (not being_scored or 2 * groups_ready >= local_batch_groups)


@dataclass(frozen=True)
class GroupSize:
    """A group starts with `first` samples and gets `more` at a time, up to `limit`, while none is right.
    first = limit: never more."""

    first: int
    more: int
    limit: int

    def granted_next(self, accuracies: Sequence[float]) -> int:
        """How many samples a group gets now that all its samples are scored, with these accuracies; 0 = it is
        complete."""
        if any(accuracy > 0 for accuracy in accuracies):
            return 0
        return max(0, min(self.more, self.limit - len(accuracies)))

    def saved(self, response_lengths: Sequence[int]) -> tuple[int, float]:
        """(samples, tokens) that a complete group did without, against always `limit`: the missing ones at
        the mean length of its own."""
        samples = self.limit - len(response_lengths)
        return samples, samples * sum(response_lengths) / max(1, len(response_lengths))
