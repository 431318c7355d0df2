"""Which trainer rank sends which bytes of the canonical layout, and which slices it gathers. Pure; called by
`Canonical` on every rank with the same input."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.kernels.slices import Slice
from laminar_hpc.weights.lanes import Lane, borders
from laminar_hpc.weights.manifest import ITEM_BYTES, Manifest
from laminar_hpc.weights.mapping import depth

_ALIKE = 0.9  # ranks that hold so much of what the best one holds of a lane take turns in sending


@dataclass(frozen=True)
class HeldSlice(Slice):
    """A slice that trainer rank `rank` holds."""

    rank: int


def plan(held: Iterable[HeldSlice]) -> dict[str, list[HeldSlice]]:
    """Slices by tensor that make it up without overlap, the first holder's of equal ones; tensors in the
    order of the model's layers, those of one layer in the order of first mention.

    `held` in the order of the ranks; a rank may hold layers of several places. Raises LaminarError when a
    tensor has a gap.
    """
    tensors: dict[str, list[HeldSlice]] = {}
    for s in held:
        of_tensor = tensors.setdefault(s.name, [])
        if s.length and (s.start, s.length) not in {(t.start, t.length) for t in of_tensor}:
            of_tensor.append(s)
    for name, slices in tensors.items():
        slices.sort(key=lambda s: s.start)
        ends = [0, *(s.start + s.length for s in slices)]
        if [s.start for s in slices] != ends[:-1] or ends[-1] != slices[0].shape[slices[0].dim]:
            raise LaminarError(
                f"the trainer ranks' slices of {name} do not make it up: "
                f"{[(s.rank, s.start, s.length) for s in slices]}"
            )
    return dict(sorted(tensors.items(), key=lambda item: depth(item[0])))


def plan_lanes(
    held: Sequence[HeldSlice], slices: dict[str, list[HeldSlice]], whole: Manifest, lanes: int
) -> list[Lane]:
    """Who sends which bytes of the layout: of those who hold about the largest part of a lane, the one with
    the fewest lanes; lane 0 is rank 0's.

    `held` by all ranks, `slices` as `plan` has them. Borders are put where pipeline stages meet, if that is
    nearly even.
    """
    holders: dict[tuple[str, int], list[int]] = {}
    for s in held:
        holders.setdefault((s.name, s.start), []).append(s.rank)
    of_tensor = [{r for s in slices[e.name] for r in holders[s.name, s.start]} for e in whole.tensors]
    stages = [
        e.offset
        for e, mine, before in zip(whole.tensors[1:], of_tensor[1:], of_tensor, strict=False)
        if mine != before
    ]
    places = borders(whole, lanes, stages)
    planned: list[Lane] = []
    for begin, end in itertools.pairwise(places):
        held_bytes: Counter[int] = Counter()
        for s, nbytes in bytes_within(slices, whole, begin, end):
            held_bytes.update(dict.fromkeys(holders[s.name, s.start], nbytes))
        largest = max(held_bytes.values())
        sending = Counter(lane.sender for lane in planned)
        alike = [rank for rank, nbytes in held_bytes.items() if nbytes >= _ALIKE * largest]
        planned.append(Lane(min(alike, key=lambda rank: (sending[rank], rank)) if planned else 0, begin, end))
    return planned


def bytes_within(
    slices: dict[str, list[HeldSlice]], whole: Manifest, begin: int, end: int
) -> Iterator[tuple[HeldSlice, int]]:
    """The slices that have bytes in [begin, end) of the layout, and how many."""
    for entry in whole.tensors:
        first, last = (
            max(begin, entry.offset) - entry.offset,
            min(end, entry.offset + entry.nbytes) - entry.offset,
        )
        if first < last:
            width = ITEM_BYTES[entry.dtype]
            for s in slices[entry.name]:
                yield s, width * (s.below(last // width) - s.below(first // width))


class GatheredLane(NamedTuple):
    """`slices`: of each tensor as it is put together for this lane, the sender's own copy of a slice where it
    has one. `bytes_of`: rank -> the bytes of the lane that it brings."""

    lane: Lane
    slices: dict[str, list[HeldSlice]]
    bytes_of: dict[int, int]


def gathered_lane(
    lane: Lane, held: Sequence[HeldSlice], slices: dict[str, list[HeldSlice]], whole: Manifest
) -> GatheredLane:
    """`held` by all ranks, `slices` as `plan` has them, `whole` the layout."""
    own = {(s.name, s.start): s for s in held if s.rank == lane.sender}
    taken = {name: [own.get((name, s.start), s) for s in of_tensor] for name, of_tensor in slices.items()}
    bytes_of: Counter[int] = Counter()
    for s, nbytes in bytes_within(taken, whole, lane.begin, lane.end):
        bytes_of[s.rank] += nbytes
    return GatheredLane(lane, taken, {rank: nbytes for rank, nbytes in bytes_of.items() if nbytes})
