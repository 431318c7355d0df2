"""Which prompts come next, and which of them are kept for a replica's next local batch, so that it can reset
their environments before.

The order is that of policies/dispatch.py. A draw that is kept for a replica goes to it, and when the replica
is gone, or the controller starts again, to whoever is next: each is used once.
"""

from collections import deque

from laminar_hpc.policies.dispatch import DrawOrder
from laminar_hpc.store.store import Store


class Upcoming:
    """The numbers of draws, counted from the store. What was in order when the last controller ended goes out
    in that order."""

    def __init__(self, store: Store, order: DrawOrder) -> None:
        self._store = store
        self._order = order
        self._saved = store.get_text("prompts_kept")
        left = list(map(int, self._saved.split()))
        order.go_on(store.get("prompts_drawn", 0) + len(left), left)
        self._kept: dict[int, deque[int]] = {}

    @property
    def used(self) -> int:
        """How many have become groups."""
        return self._order.next - len(self._unused())

    def take(self, replica: int, batch: int = 1) -> int:
        """For a group that this replica gets in a local batch of so many."""
        kept = self._kept.get(replica)
        return kept.popleft() if kept else self._order.take(batch)

    def keep(self, replica: int, count: int) -> list[int]:
        """The next `count` that it will take, which are a local batch."""
        kept = self._kept.setdefault(replica, deque())
        while len(kept) < count:
            kept.append(self._order.take(count))
        return list(kept)[:count]

    def release(self, replica: int) -> None:
        """It is gone."""
        self._order.put_back(list(self._kept.pop(replica, ())))

    def save(self) -> None:
        """In the transaction of what was taken."""
        self._store.put("prompts_drawn", self.used)
        unused = " ".join(map(str, self._unused()))
        if unused != self._saved:
            self._store.put_text("prompts_kept", unused)
            self._saved = unused

    def _unused(self) -> list[int]:
        """What was kept for somebody goes out first when a controller starts again."""
        return [*sorted(draw for kept in self._kept.values() for draw in kept), *self._order.left]
