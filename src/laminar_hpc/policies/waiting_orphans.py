"""Trajectories of dead replicas that wait until a replica reports room on their weights, or loads them; by
weights and size, so that a report costs as much as goes on by it, however many wait. Pure.

    >>> waiting = WaitingOrphans()
    >>> for i, tokens in enumerate((300, 50, 200)):
    ...     waiting.put(Orphan(i, weight_id=4, tokens=tokens, response_tokens=tokens), attempt=1, since=0.0)
    >>> waiting.fitting(Room(0, 4, 260.0)), waiting.fitting(Room(0, 5, 1e9)), waiting.weight_ids
    ([2, 1], [], {4})
    >>> waiting.pop(2), len(waiting)
    ((1, 0.0), 2)
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple

from laminar_hpc.policies.failover import Orphan, Room


class _Waits(NamedTuple):
    attempt: int
    since: float
    weight_id: int
    place: tuple[int, int]  # tokens and -id: of equal ones the first is the last of its line


class WaitingOrphans:
    """Keeps trajectories that wait for a replica, by their id."""

    def __init__(self) -> None:
        self._waits: dict[int, _Waits] = {}
        self._lines: dict[int, list[tuple[int, int]]] = {}  # by weight id, places in order

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(trajectory, attempt) in the order of coming."""
        return ((trajectory_id, each.attempt) for trajectory_id, each in self._waits.items())

    @property
    def weight_ids(self) -> set[int]:
        """That they must go on with."""
        return set(self._lines)

    def put(self, orphan: Orphan, attempt: int, since: float) -> None:
        """One that does not wait yet."""
        place = (orphan.tokens, -orphan.trajectory_id)
        self._waits[orphan.trajectory_id] = _Waits(attempt, since, orphan.weight_id, place)
        insort(self._lines.setdefault(orphan.weight_id, []), place)

    def pop(self, trajectory_id: int) -> tuple[int, float]:
        """One that waits, and does so no more: its attempt, and since when it had waited."""
        waits = self._waits.pop(trajectory_id)
        line = self._lines[waits.weight_id]
        del line[bisect_left(line, waits.place)]
        if not line:
            del self._lines[waits.weight_id]
        return waits.attempt, waits.since

    def discard(self, trajectory_id: int) -> None:
        """It does not wait, or no more."""
        if trajectory_id in self._waits:
            self.pop(trajectory_id)

    def fitting(self, room: Room) -> list[int]:
        """Those that can go on in `room`, as `failover.redirect` would place them: the longest first."""
        line, free, found = self._lines.get(room.weight_id, []), room.kv_tokens_free, list[int]()
        end = len(line)
        while end := bisect_right(line, (free, 0), 0, end):
            tokens, minus_id = line[end - 1]
            found.append(-minus_id)
            free -= tokens
            end -= 1
        return found
