"""Replicas without work, in the order in which they asked, and by what decides for all alike whether they can
get any: the weights that they serve, and whether some of what they generated is not scored yet. Pure.

Who looks for the next one to serve asks each kind once, not each replica.

    >>> line = WaitingLine()
    >>> line.ask(5, weight_id=1); line.ask(6, weight_id=2); line.ask(7, weight_id=1)
    >>> line.scores(7, True)
    >>> line.first((1, False)), line.first((1, False), behind=0), line.count(1)
    ((0, 5), None, 2)
    >>> list(line.in_turn(lambda kind: kind[0] == 1))
    [5, 7]
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace

Kind = tuple[int, bool]  # weight id, whether some of what it generated is not scored yet
_Place = tuple[int, int]  # the number of its request, the replica


class WaitingLine:
    """One that asks again keeps its place."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by replica, in the order of asking
        self._kinds: dict[int, Kind] = {}
        self._lines: dict[Kind, list[_Place]] = {}
        self._next = 0
        self.changes = 0  # rises when one comes, goes, or serves other weights

    # ---- what happens --------------------------------------------------------------------------------------

    def ask(self, replica: int, weight_id: int) -> None:
        """For work on these weights."""
        scores = self._kinds[replica][1] if replica in self._kinds else False
        if replica not in self._numbers:
            self._numbers[replica] = self._next
            self._next += 1
        self._enter(replica, (weight_id, scores))

    def scores(self, replica: int, scores: bool) -> None:
        """Whether some of what it generated is not scored yet; of one that does not wait nothing is kept."""
        if replica in self._numbers:
            self._enter(replica, (self._kinds[replica][0], scores))

    def leave(self, replica: int) -> None:
        """It has work, or is gone."""
        if replica in self._numbers:
            self._take_out(replica)
            del self._numbers[replica]

    def _enter(self, replica: int, kind: Kind) -> None:
        if self._kinds.get(replica) == kind:
            return
        if replica in self._kinds:
            self._take_out(replica)
        self._kinds[replica] = kind
        self.changes += 1
        insort(self._lines.setdefault(kind, []), (self._numbers[replica], replica))

    def _take_out(self, replica: int) -> None:
        kind = self._kinds.pop(replica)
        self.changes += 1
        places = self._lines[kind]
        del places[bisect_left(places, (self._numbers[replica], replica))]
        if not places:
            del self._lines[kind]

    # ---- who waits -----------------------------------------------------------------------------------------

    def __contains__(self, replica: int) -> bool:
        return replica in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        """In the order in which they asked."""
        return iter(self._numbers)

    def weight_id(self, replica: int) -> int | None:
        """That it serves; None when it does not wait."""
        return self._kinds[replica][0] if replica in self._kinds else None

    def first(self, kind: Kind, behind: int = -1) -> _Place | None:
        """(number of its request, replica) of the first of that kind, or the first whose number is larger
        than `behind`."""
        places = self._lines.get(kind, [])
        place = bisect_left(places, (behind + 1, -1))
        return places[place] if place < len(places) else None

    def in_turn(self, may_get: Callable[[Kind], bool]) -> Iterator[int]:
        """Replicas in the order in which they asked, of the kinds that `may_get` something when it is their
        turn. One that cannot is left out from there on: what is given to others in a pass leaves less. They
        may leave meanwhile."""
        heads = [(place, kind) for kind in self._lines if (place := self.first(kind)) is not None]
        heapify(heads)
        while heads:
            (number, replica), kind = heads[0]
            if not may_get(kind):
                heappop(heads)
                continue
            yield replica
            place = self.first(kind, number)
            if place is None:
                heappop(heads)
            else:
                heapreplace(heads, (place, kind))

    def count(self, weight_id: int) -> int:
        """How many wait that serve these weights."""
        return sum(len(self._lines.get((weight_id, scores), ())) for scores in (False, True))
