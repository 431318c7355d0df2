"""Dynamic repack (Laminar, section 4): empty replicas that only hold the tail of their local batch, so that
they can take new weights.

Pure: from what the replicas report to merges of whole replicas, inside one weight id, because a trajectory
keeps its policy. Called about every five seconds and after each update; the caller carries the merges out
(ships the KV cache, or prefills again).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

# destinations looked at for one source when the request limit, not the KV limit, refuses the fullest ones
_PROBES = 8


@dataclass(frozen=True)
class ReplicaView:
    """What the plan sees of a replica that generates. `kv_tokens` counts what its unfinished trajectories
    hold or are about to hold, those too that wait for a tool, of which there are `waiting`."""

    replica: int
    weight_id: int
    kv_tokens: float
    kv_tokens_before: float  # at the previous planning; more than now means that the ramp-down has begun
    requests: int
    waiting: int = 0

    @property
    def ramps_down(self) -> bool:
        """Its KV use falls, or stands still because all of its requests wait for tools."""
        return 0 < self.requests == self.waiting or self.kv_tokens < self.kv_tokens_before


@dataclass(frozen=True)
class Merge:
    """All unfinished trajectories of `source` go to `destination`."""

    source: int
    destination: int


def saturation_batch(flops: float, memory_bytes_per_second: float) -> int:
    """B: tokens per decode step at which reading the weights and computing take equally long (roofline; 295
    on an H800). In bf16 a parameter has 2 bytes, and a token costs 2 FLOPs of it."""
    return int(flops / memory_bytes_per_second)


def plan(replicas: Iterable[ReplicaView], kv_tokens_max: float, requests_max: int) -> list[Merge]:
    """Best-fit consolidation of every weight id's group, O(n log n).

    Candidates are replicas whose KV use falls, below `kv_tokens_max` (C_max), with fewer than `requests_max`
    (B) requests. Sources go from the emptiest up, each to the fullest candidate where both sums still fit. No
    replica is both emptied and filled.
    """
    groups: dict[int, list[ReplicaView]] = {}
    for each in replicas:
        if 0 < each.requests < requests_max and each.kv_tokens < kv_tokens_max and each.ramps_down:
            groups.setdefault(each.weight_id, []).append(each)
    return [
        merge
        for weight_id in sorted(groups)
        for merge in _plan_group(groups[weight_id], kv_tokens_max, requests_max)
    ]


def _plan_group(candidates: list[ReplicaView], kv_tokens_max: float, requests_max: int) -> list[Merge]:
    """Sources come in order of KV, so a destination too full for one source is too full for all later ones
    and leaves for good."""
    order = sorted(candidates, key=lambda each: (each.kv_tokens, each.replica))
    kv = [each.kv_tokens for each in order]
    requests = [each.requests for each in order]
    requests_min = list(accumulate(reversed(requests), min))[::-1]  # among this source and all later ones
    # by KV, fullest last; what one receives keeps it the fullest that fits
    destinations = list(range(len(order)))
    merges: list[Merge] = []
    filled: set[int] = set()
    emptied: set[int] = set()
    for source in range(len(order)):
        if source in filled:
            continue
        while destinations and (
            kv[destinations[-1]] + kv[source] > kv_tokens_max
            or requests[destinations[-1]] + requests_min[source] > requests_max
        ):
            destinations.pop()
        for place in range(len(destinations) - 1, max(-1, len(destinations) - 1 - _PROBES), -1):
            destination = destinations[place]
            if (
                destination != source
                and destination not in emptied
                and requests[destination] + requests[source] <= requests_max
            ):
                kv[destination] += kv[source]
                requests[destination] += requests[source]
                filled.add(destination)
                emptied.add(source)
                merges.append(Merge(order[source].replica, order[destination].replica))
                _raise_to_order(destinations, place, kv)
                break
    return merges


def _raise_to_order(destinations: list[int], place: int, kv: list[float]) -> None:
    """Restores the order by KV after the destination at `place`, at most _PROBES from the end, has
    received."""
    while place + 1 < len(destinations) and kv[destinations[place]] > kv[destinations[place + 1]]:
        destinations[place], destinations[place + 1] = destinations[place + 1], destinations[place]
        place += 1
