"""Which prompts come next, and which of them are kept for a replica's next local batch, so that it can reset
their environments before.

The order of draws is that of policies/sampling.py. One that is kept for a replica goes to it, and when the
replica is gone, or the controller starts again, to whoever is next: each is used once.
"""

from collections import deque

from laminar_hpc.store.store import Store


class Upcoming:
    """The numbers of draws, counted from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._saved = store.get_text("prompts_kept")
        self._free = deque(map(int, self._saved.split()))  # were kept for somebody
        self._kept: dict[int, deque[int]] = {}
        self._next = store.get("prompts_drawn", 0) + len(self._free)

    @property
    def used(self) -> int:
        """How many have become groups."""
        return self._next - len(self._all_kept())

    def take(self, replica: int) -> int:
        """For a group that this replica gets."""
        kept = self._kept.get(replica)
        return kept.popleft() if kept else self._another()

    def keep(self, replica: int, count: int) -> list[int]:
        """The next `count` that it will take."""
        kept = self._kept.setdefault(replica, deque())
        while len(kept) < count:
            kept.append(self._another())
        return list(kept)[:count]

    def release(self, replica: int) -> None:
        """It is gone."""
        self._free.extend(self._kept.pop(replica, ()))

    def save(self) -> None:
        """In the transaction of what was taken."""
        self._store.put("prompts_drawn", self.used)
        kept = " ".join(map(str, self._all_kept()))
        if kept != self._saved:
            self._store.put_text("prompts_kept", kept)
            self._saved = kept

    def _another(self) -> int:
        if self._free:
            return self._free.popleft()
        self._next += 1
        return self._next - 1

    def _all_kept(self) -> list[int]:
        return sorted([*self._free, *(draw for kept in self._kept.values() for draw in kept)])
