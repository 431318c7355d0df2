"""Where the unfinished trajectories of a dead replica go on: always on the weights that they began with.

    redirect       to a replica that generates with them and has room
    plan_reloads   to a replica without work that loads them from a relay's slot

What nobody takes starts again from its prompt.

Pure; the partial responses are known (partial-response pool), so that a trajectory is prefilled again and
goes on.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Orphan:
    """A trajectory whose replica is dead; its weights are those that it must go on with."""

    trajectory_id: int
    weight_id: int
    tokens: int  # prompt and response so far
    response_tokens: int  # of these, what would have to be generated anew


@dataclass(frozen=True)
class Room:
    """A healthy replica that generates with `weight_id`, and the KV tokens that it has free. One that holds
    several ids (refresh=versions) has a room of each, with the same tokens."""

    replica: int
    weight_id: int
    kv_tokens_free: float


@dataclass(frozen=True)
class Idle:
    """A replica without work: it asks for some, on `weight_id`, or is starting (None); and what the slots of
    its machine still hold."""

    replica: int
    weight_id: int | None
    loadable: frozenset[int]
    kv_tokens_free: float
    tokens_per_reload: float  # that a replica generates in the time of a reload

    def price(self, weight_id: int) -> float:
        """In tokens, of the reloads that it would not do otherwise: there and back, or one where it has to
        load something anyway."""
        starting = self.weight_id is None
        if weight_id == self.weight_id or (starting and weight_id == max(self.loadable)):
            return 0.0
        return self.tokens_per_reload * (1 if starting else 2)


@dataclass(frozen=True)
class Reload:
    """`replica` loads `weight_id`, unless it serves that already, and goes on with these trajectories."""

    replica: int
    weight_id: int
    trajectory_ids: list[int]


def redirect(
    orphans: Sequence[Orphan], rooms: Iterable[Room], kv_tokens_reserved: float = 0.0
) -> dict[int, int]:
    """trajectory_id -> replica, the longest first, each to the replica with most room; those without any are
    left out.

    `kv_tokens_reserved` is kept free for each one's growth. O((n + m) log m).
    """
    heaps: dict[int, list[tuple[float, int]]] = {}
    free: dict[int, float] = {}
    for room in rooms:
        free[room.replica] = room.kv_tokens_free
        heaps.setdefault(room.weight_id, []).append((-room.kv_tokens_free, room.replica))
    for heap in heaps.values():
        heapq.heapify(heap)
    placed = {}
    for orphan in sorted(orphans, key=lambda o: (-o.tokens, o.trajectory_id)):
        heap = heaps.get(orphan.weight_id, [])
        need = orphan.tokens + kv_tokens_reserved
        while heap and -heap[0][0] > free[heap[0][1]]:  # what has come there on other weights
            heapq.heapreplace(heap, (-free[heap[0][1]], heap[0][1]))
        if heap and -heap[0][0] >= need:
            replica = heap[0][1]
            free[replica] -= need
            heapq.heapreplace(heap, (-free[replica], replica))
            placed[orphan.trajectory_id] = replica
    return placed


def plan_reloads(
    orphans: Iterable[Orphan], idle: Iterable[Idle], kv_tokens_reserved: float = 0.0
) -> tuple[list[Reload], list[int]]:
    """(what replicas without work go on with, trajectories that start again from their prompts); the others
    wait for a replica to ask.

    The id with the most tokens first, of it the longest first, to those who ask for work before those who are
    starting, and where it costs least. A reload must save at least as many tokens as its price. Nobody waits
    while a replica asks and gets nothing: what it cannot go on with it can only begin anew, and the next one
    would find fewer ids in the slots. So a replica that asks takes some, or settles all there are.
    """
    left: dict[int, list[Orphan]] = {}
    for orphan in sorted(orphans, key=lambda o: (-o.tokens, o.trajectory_id)):
        left.setdefault(orphan.weight_id, []).append(orphan)
    free, reloads = list(idle), []
    for weight_id in sorted(left, key=lambda i: (-_saved(left[i]), i)):
        able = [each for each in free if weight_id == each.weight_id or weight_id in each.loadable]
        for each in sorted(
            able, key=lambda e: (e.weight_id is None, e.price(weight_id), -e.kv_tokens_free, e.replica)
        ):
            taken, rest = _split(left[weight_id], each.kv_tokens_free, kv_tokens_reserved)
            if taken and _saved(taken) >= each.price(weight_id):
                reloads.append(Reload(each.replica, weight_id, [orphan.trajectory_id for orphan in taken]))
                free.remove(each)
                left[weight_id] = rest
    asks = any(each.weight_id is not None for each in free)
    return reloads, sorted(orphan.trajectory_id for mine in left.values() for orphan in mine) if asks else []


def _saved(orphans: list[Orphan]) -> int:
    return sum(orphan.response_tokens for orphan in orphans)


def _split(
    orphans: list[Orphan], kv_tokens_free: float, kv_tokens_reserved: float
) -> tuple[list[Orphan], list[Orphan]]:
    """(those that fit, the others)."""
    taken: list[Orphan] = []
    rest: list[Orphan] = []
    for orphan in orphans:
        need = orphan.tokens + kv_tokens_reserved
        fits = need <= kv_tokens_free
        (taken if fits else rest).append(orphan)
        kv_tokens_free -= need if fits else 0.0
    return taken, rest
