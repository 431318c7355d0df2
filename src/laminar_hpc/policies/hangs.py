"""When a rank that pings but makes no progress counts as stuck. Pure.

The limit of a phase is FACTOR times the longest time between two signs of progress that any rank has needed
in it so far, and never below the phase's floor. A phase of which no end has been seen has the `first` limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FACTOR = 5.0
_ASLEEP_SECONDS = 5.0  # between two looks: whoever looks stood still, not the ranks


class Stuck(NamedTuple):
    """A rank, what it does, for how many seconds without progress, and the longest time seen before (None:
    no end of that phase has been seen)."""

    rank: int
    phase: str
    seconds: float
    longest: float | None


class _At(NamedTuple):
    phase: str
    signs: int
    since: float


@dataclass
class HangWatch:
    """`floors`: seconds by phase; a phase without one is not watched. Times are monotonic seconds."""

    floors: Mapping[str, float]
    first: float
    longest: dict[str, float] = field(default_factory=dict)
    _ranks: dict[int, _At] = field(default_factory=dict)
    _looked: float = 0.0

    def heard(self, rank: int, phase: str, count: int, now: float) -> None:
        """The rank has made `count` signs of progress so far, the newest one on entering or in `phase`."""
        before = self._ranks.get(rank)
        if before is not None and before.signs == count:
            return
        if before is not None:
            self.longest[before.phase] = max(self.longest.get(before.phase, 0.0), now - before.since)
        self._ranks[rank] = _At(phase, count, now)

    def forget(self) -> None:
        """Other ranks come; what is normal stays known."""
        self._ranks.clear()

    def limit(self, phase: str) -> float:
        """Seconds."""
        floor = self.floors.get(phase, float("inf"))
        longest = self.longest.get(phase)
        return max(floor, self.first if longest is None else FACTOR * longest)

    def look(self, now: float) -> Stuck | None:
        """The rank that has stood still for longest beyond its limit, if any."""
        if now - self._looked > _ASLEEP_SECONDS:
            self._ranks = {rank: at._replace(since=now) for rank, at in self._ranks.items()}
        self._looked = now
        late = [
            Stuck(rank, at.phase, now - at.since, self.longest.get(at.phase))
            for rank, at in self._ranks.items()
            if now - at.since > self.limit(at.phase)
        ]
        return max(late, key=lambda stuck: stuck.seconds, default=None)
