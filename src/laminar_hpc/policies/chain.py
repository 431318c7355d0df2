"""The relay chain as arithmetic: into how many chunks a publication is cut, who stands where, and who sends
again to whom."""

import math
from collections.abc import Mapping, Sequence

CHUNK_MIN = 64 << 10  # bytes: below this, Python's share of a chunk is more than the network's
_ALIGNMENT = 4096


def broadcast_seconds(
    size: int, relays: int, chunks: int, start_seconds: float, seconds_per_byte: float
) -> float:
    """Until the last of `relays` has all `size` bytes, which come in `chunks` equal chunks (Laminar, arXiv
    2510.12633, relay tier; p counts the source):
    T(p, k) = (p + k - 2) * (M / k * Tb + Ts) with p = relays + 1."""
    return (relays + chunks - 1) * (size / chunks * seconds_per_byte + start_seconds)


def best_chunks(size: int, relays: int, start_seconds: float, seconds_per_byte: float) -> int:
    """k* = sqrt((p - 2) * M * Tb / Ts), at least 1: the number of chunks for which `broadcast_seconds` is
    smallest (the same section)."""
    return max(1, round(math.sqrt(max(0, relays - 1) * size * seconds_per_byte / max(start_seconds, 1e-9))))


def chunk_bytes(size: int, relays: int, start_seconds: float, seconds_per_byte: float, chunk_max: int) -> int:
    """Bytes per chunk for k*, in whole pages, from CHUNK_MIN to `chunk_max` (which holds where one relay
    would take all in one chunk)."""
    wanted = math.ceil(size / best_chunks(size, relays, start_seconds, seconds_per_byte))
    return max(CHUNK_MIN, min(chunk_max, math.ceil(wanted / _ALIGNMENT) * _ALIGNMENT))


def chain_order(before: Sequence[int], fit: Sequence[int], has: Mapping[int, int]) -> list[int]:
    """The chain anew: who stood in it stays in order, newcomers go to its end; then, stably, those with newer
    weights to the front.

    So whoever misses the newest weights stands behind somebody who has them, and the master's death makes the
    next one the master.
    """
    stay = [index for index in before if index in fit]
    order = [*stay, *sorted(set(fit) - set(stay))]
    return sorted(order, key=lambda index: (index not in has, -has.get(index, 0)))


def missing(
    order: Sequence[int], has: Mapping[int, int], coming: Mapping[int, int]
) -> tuple[int, int] | None:
    """The first stretch [begin, end) of the chain that misses the newest weights held in it, to be served by
    the member before it; None when nobody does, or when they are on their way to those who do (`coming`: the
    newest id of which that is known)."""
    held = [has[index] for index in order if index in has]
    if not held:
        return None
    newest = max(held)
    current = [has.get(index) == newest for index in order]
    begin = next((place for place, is_current in enumerate(current) if not is_current), 0)
    end = begin
    while begin and end < len(order) and not current[end] and coming.get(order[end], -1) < newest:
        end += 1
    return (begin, end) if end > begin else None
