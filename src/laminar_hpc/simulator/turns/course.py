"""What trajectories of several turns do: tokens drawn and given, and seconds of their environments."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Took(NamedTuple):
    """Of the calls of one turn, or of a reset. `seconds`: math.inf never returns. `failed`: the environment
    is of no use any more; of functions, which have nothing to lose, the model is told instead."""

    seconds: float
    failed: bool = False


NOTHING = Took(0.0)


@dataclass(frozen=True)
class Course:
    """`drawn`: tokens of each turn. Behind each but the last: `given` tokens, for so many `calls`, which
    `took` their time. `opening`: tokens of the reset."""

    drawn: Sequence[int]
    given: Sequence[int]
    calls: Sequence[int]
    took: Sequence[Took]
    reset: Took = NOTHING
    opening: int = 0

    def scaled(self, by: float) -> "Course":
        """With `by` times as many drawn tokens in each turn."""
        return replace(self, drawn=[max(1, round(n * by)) for n in self.drawn])


@dataclass(frozen=True)
class Known:
    """Environments as they were: courses of each group in the order of their grants, without what their
    calls took; what calls and resets took, all of them, from which it is drawn."""

    groups: Sequence[Sequence[Course]]
    calls: Sequence[Took]
    resets: Sequence[Took]

    def course(self, index: int, sample: int, seed: int, tries: int = 1) -> Course:
        """Of a sample of group `index`, by these numbers alone; another try takes other times."""
        group = self.groups[index % len(self.groups)]
        found = group[sample % len(group)]
        draw = random.Random(f"{seed}/{index}/{sample}/{tries}")
        took = [draw.choice(self.calls) for _ in found.given]
        reset = draw.choice(self.resets) if self.resets else NOTHING
        return Course(found.drawn, found.given, found.calls, took, reset, found.opening)


def even(tokens: int, turns: int, given: int, seconds: Sequence[float]) -> Course:
    """So many tokens in turns of equal length, each but the last with one call."""
    each, between = max(1, tokens // turns), turns - 1
    last = max(1, tokens - between * (tokens // turns))
    took = [Took(s, failed=s == math.inf) for s in seconds[:between]]
    return Course([each] * between + [last], [given] * between, [1] * between, took)
