"""Where the unfinished trajectories of a dead replica go: to a healthy replica on the same weights, else back to their prompts.

Pure; the partial responses are known (partial-response pool), so that a redirected trajectory is prefilled again and goes on.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Orphan:
    trajectory_id: int
    weight_id: int
    tokens: int  # prompt and response so far


@dataclass(frozen=True)
class Room:
    """A healthy replica that generates with `weight_id`, and the KV tokens that it has free."""

    replica: int
    weight_id: int
    kv_tokens_free: float


def redirect(orphans: Sequence[Orphan], rooms: Iterable[Room], kv_tokens_reserved: float = 0.0) -> dict[int, int]:
    """trajectory_id -> replica, the longest first, each to the replica with most room; those without any are left out and start again.

    `kv_tokens_reserved` is kept free for each one's growth. O((n + m) log m).
    """
    heaps: dict[int, list[tuple[float, int]]] = {}
    for room in rooms:
        heaps.setdefault(room.weight_id, []).append((-room.kv_tokens_free, room.replica))
    for heap in heaps.values():
        heapq.heapify(heap)
    placed = {}
    for orphan in sorted(orphans, key=lambda o: (-o.tokens, o.trajectory_id)):
        heap = heaps.get(orphan.weight_id, [])
        need = orphan.tokens + kv_tokens_reserved
        if heap and -heap[0][0] >= need:
            free, replica = heap[0]
            heapq.heapreplace(heap, (free + need, replica))
            placed[orphan.trajectory_id] = replica
    return placed
