"""The staleness bound of each set of weights, and how it follows who waits (pipeline.max_staleness=auto).
Pure; live system and simulator use it.

Weights of step p have a bound b(p), and what is granted on them is due at step p + b(p). The proof in
admission.py needs two things of b, which `StepBounds` holds:

  - b(p) is decided once, before anything is granted on p, so that no promise to a granted trajectory changes;
  - p + b(p) never falls as p grows, so that the order of weights is that of due steps: from one step to the
    next the bound rises by any number and falls by one at most.

`AdaptiveBound` raises the bound when the trainer waits and the bound stands in the way: enough groups have
finished, and one that is unfinished is due too soon; or admission grants nothing more on the newest weights,
so that replicas idle or keep a tail that repack could move. It rises by as many steps as could have been
trained meanwhile, at least one, since a bound larger by so many would have spared the wait. It falls by one
when for a while the trainer has not waited and would not have waited with a bound smaller by one: what that
step adds to the buffer only ages there. A fall that is taken back doubles the number of such steps before the
next one, so that the bound comes to rest.

    >>> bounds = StepBounds(2)
    >>> bounds.decide(1, 5), bounds.decide(2, 0)
    (5, 4)
    >>> [bounds.due(step) for step in range(4)]
    [2, 6, 6, 6]
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

FIRST = 2  # the bound at the beginning of a run
HELD_SHARE = 0.05  # of a step that the bound may cost the trainer
QUIET_SHARE = 0.02  # of a step: a shorter wait is the way of a batch to the trainer, not a lack of data
PATIENCE = 8  # quiet steps before the bound is lowered
PATIENCE_MAX = 128  # of them, after lowerings that were taken back
_LEAST = 1  # with a bound of 0 the trainer always waits


class StepBounds:
    """The bound of each weight step. Up to the first decision it is `first`; after the last one too, or as
    near to it as the second rule allows."""

    def __init__(self, first: int, decided: Mapping[int, int] | None = None) -> None:
        """`decided`: by weight step, of earlier controllers."""
        self.first = first
        self._decided = dict(decided or {})
        self._steps = sorted(self._decided)

    @property
    def newest(self) -> int:
        """The bound decided last."""
        return self._decided[self._steps[-1]] if self._steps else self.first

    def at(self, step: int) -> int:
        """The bound of the weights of this step."""
        if not self._steps or step < self._steps[0]:
            return self.first
        if step in self._decided:
            return self._decided[step]
        before = self._steps[bisect_right(self._steps, step) - 1]
        return max(self.first, before + self._decided[before] - step)

    def due(self, step: int) -> int:
        """The step that trains at the latest what is granted on the weights of this one."""
        return step + self.at(step)

    def decide(self, step: int, bound: int) -> int | None:
        """The bound that step `step` has from here on; None if that was decided before."""
        if self._steps and step <= self._steps[-1]:
            return None
        self._decided[step] = max(bound, self.at(step - 1) - 1)
        self._steps.append(step)
        return self._decided[step]


@dataclass(frozen=True)
class StepWaits:
    """Seconds of one trainer step; of these it waited for data, and of these with the bound in the way.
    `spare`: a bound smaller by one would have let it take its groups as well, each time."""

    seconds: float
    waited: float
    held_back: float
    spare: bool


class WaitWatch:
    """Adds up the trainer's waits, as they are seen at each look."""

    def __init__(self) -> None:
        self._since: float | None = None  # the last step was done
        self._looked = 0.0
        self._waits = False
        self._held = False
        self._waited = 0.0
        self._held_back = 0.0
        self._spare = True

    def look(self, now: float, waits: bool, held: bool = False) -> None:
        """From `now` on the trainer waits or does not, with the bound in the way or without."""
        if self._waits:
            self._waited += now - self._looked
        if self._waits and self._held:
            self._held_back += now - self._looked
        self._looked = now
        self._waits = waits
        self._held = held

    def taken(self, now: float, spare: bool) -> None:
        """The trainer has its groups. `spare`: as in StepWaits."""
        self.look(now, waits=False)
        self._spare = self._spare and spare

    def step_done(self, now: float) -> StepWaits | None:
        """What was seen since the step before; None for the first one, which begins with an empty buffer."""
        self.look(now, waits=False)
        since = now if self._since is None else self._since
        seen = StepWaits(now - since, self._waited, self._held_back, self._spare)
        first = self._since is None
        self._since = now
        self._waited = self._held_back = 0.0
        self._spare = True
        return None if first else seen


class AdaptiveBound:
    """The bound that the next weights should have. Never above `maximum`."""

    def __init__(self, bound: int, maximum: int) -> None:
        self.bound = min(bound, maximum)
        self._maximum = maximum
        self._patience = PATIENCE
        self._quiet = 0  # steps in a row
        self._settling = 0  # steps for which the last change has still to show
        self._lowered = False  # by the last change

    def after(self, seen: StepWaits) -> int:
        """The bound after one more step."""
        self._settling = max(0, self._settling - 1)
        quiet = seen.waited <= QUIET_SHARE * seen.seconds and seen.spare
        self._quiet = self._quiet + 1 if quiet else 0
        if self._settling:
            return self.bound
        if seen.held_back > HELD_SHARE * seen.seconds and self.bound < self._maximum:
            if self._lowered:
                self._patience = min(2 * self._patience, PATIENCE_MAX)
            trained = seen.seconds - seen.waited
            steps = round(seen.held_back / trained) if trained > 0 else 1
            self._change(min(max(1, steps), self._maximum - self.bound))
        elif self._quiet >= self._patience and self.bound > _LEAST:
            self._change(-1)
        return self.bound

    def _change(self, by: int) -> None:
        self.bound += by
        self._lowered = by < 0
        # after a rise, until what was granted by the bound before it is trained
        self._settling = self.bound if by > 0 else 0
        self._quiet = 0
