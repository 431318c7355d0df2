"""The live weights under Hugging Face names, put together from the shards that all trainer ranks hold.

Used by trainer/megatron/policy.py: `pack` for publishing, on the rank that sends a lane; `tensors` for
checkpoints, on rank 0. At the start every rank says which slices it holds; of those that several ranks hold
(replicas, norms, the copy of a tied embedding) only one is taken: that of the rank where they are put
together, else the first rank's. So each byte comes there once.
"""

import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.kernels import pack, place
from laminar_hpc.trainer.canonical.exchange import Exchange
from laminar_hpc.weights.lanes import Lane, borders
from laminar_hpc.weights.manifest import ITEM_BYTES, Manifest, layout
from laminar_hpc.weights.mapping import Piece
from laminar_hpc.weights.stream import Part
from laminar_hpc.weights.sums import add_sums, shifted

log = logging.getLogger(__name__)
_ALIKE = 0.9  # ranks that hold so much of what the best one holds of a lane take turns in sending

TensorSums = Callable[[], list[tuple[int, int]]]  # of each part of a chunk


class Slice(msgspec.Struct, frozen=True):
    """Elements [start, start + length) along `dim` of the tensor `name`, whose whole shape is `shape`; `rank`
    holds them."""

    rank: int
    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    length: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def below(self, place: int) -> int:
        """How many of the slice's items come before item `place` of the whole tensor, both in row-major
        order."""
        inner = math.prod(self.shape[self.dim + 1 :])
        block, inside = divmod(place, self.shape[self.dim] * inner)
        return block * self.length * inner + min(max(inside - self.start * inner, 0), self.length * inner)


def plan(held: Iterable[Slice]) -> dict[str, list[Slice]]:
    """Slices by tensor that make it up without overlap, the first holder's of equal ones; tensors in the
    order of first mention.

    `held` in the order of the ranks, so the order is that of the pipeline's stages. Raises LaminarError when
    a tensor has a gap.
    """
    tensors: dict[str, list[Slice]] = {}
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
    return tensors


def plan_lanes(
    held: Sequence[Slice], slices: dict[str, list[Slice]], whole: Manifest, lanes: int
) -> list[Lane]:
    """Who sends which bytes of the layout: of those who hold most of a lane the one with the fewest lanes;
    lane 0 is rank 0's.

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
    found: list[Lane] = []
    for begin, end in itertools.pairwise(places):
        held_bytes: Counter[int] = Counter()
        for s, nbytes in _within(slices, whole, begin, end):
            held_bytes.update(dict.fromkeys(holders[s.name, s.start], nbytes))
        most = max(held_bytes.values())
        sending = Counter(lane.sender for lane in found)
        alike = [rank for rank, nbytes in held_bytes.items() if nbytes >= _ALIKE * most]
        found.append(Lane(min(alike, key=lambda rank: (sending[rank], rank)) if found else 0, begin, end))
    return found


def _within(
    slices: dict[str, list[Slice]], whole: Manifest, begin: int, end: int
) -> Iterator[tuple[Slice, int]]:
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


class Canonical:
    """Collective over the trainer world: making one, and running through `tensors` or `pack`."""

    def __init__(
        self, pieces: Sequence[Piece], dtype: torch.dtype, lanes: int, seconds: float, publish_seconds: float
    ) -> None:
        """`pieces` of this rank, published in `dtype`; `seconds` bounds each wait for another rank, and
        `publish_seconds` those of a rank for a relay."""
        rank, everyone = dist.get_rank(), dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        first = parallel_state.get_data_parallel_rank() == 0  # the other replicas hold the same
        mine = (
            [Slice(rank, p.name, p.shape, p.dim, p.start, p.length) for p in pieces]
            if first or lanes > 1
            else []
        )
        held = [
            msgspec.json.decode(frame, type=list[Slice])
            for frame in _all_frames(msgspec.json.encode(mine), everyone)
        ]
        everything = [s for of_rank in held for s in of_rank]
        self.slices, owned = plan(everything), {(s.rank, s.name, s.start): s for s in everything}
        whole = layout(self.metadata(dtype), 0, 0)
        self.lanes = plan_lanes(everything, self.slices, whole, lanes)
        self._of_lane = [
            {
                name: [owned.get((lane.sender, name, s.start), s) for s in slices]
                for name, slices in self.slices.items()
            }
            for lane in self.lanes
        ]
        self.gathered_bytes = []  # of each lane, those that other ranks bring
        taking = {0, *(lane.sender for lane in self.lanes)}
        for lane, slices in zip(self.lanes, self._of_lane, strict=True):
            within = [
                (s.rank, nbytes) for s, nbytes in _within(slices, whole, lane.begin, lane.end) if nbytes
            ]
            taking |= {r for r, _ in within}
            self.gathered_bytes.append(sum(nbytes for r, nbytes in within if r != lane.sender))
        if rank == 0 and lanes > 1:
            for number, (lane, gathered) in enumerate(zip(self.lanes, self.gathered_bytes, strict=True)):
                size = lane.end - lane.begin
                log.info(
                    "lane %d: %d bytes leave trainer %d, which gathers %.0f%% of them",
                    number,
                    size,
                    lane.sender,
                    100 * gathered / size,
                )
        holders = sorted({s.rank for slices in self.slices.values() for s in slices} | {0})
        self._exchange, self.publishing = (
            Exchange(holders, seconds),
            Exchange(sorted(taking), seconds + publish_seconds),
        )

    def metadata(self, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, whole shape and `dtype` of every tensor of the model, in the order of a Hugging Face state
        dict. On every rank."""
        return [(name, slices[0].shape, dtype) for name, slices in self.slices.items()]

    def tensors(
        self, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 the tensors, whole, contiguous, as `metadata` lists them: views of the parameters where
        one rank holds all and the layouts agree, else on `device`. The other ranks send their slices and get
        nothing, but must run through."""
        local = _by_name(pieces)
        for name, slices in self.slices.items():
            if dist.get_rank() == 0:
                yield name, self._whole(slices, local.get(name), dtype, device)
            else:
                self._send(slices, local.get(name), dtype)

    def pack(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        parts: Sequence[Part],
        bucket: torch.Tensor | None,
        number: int = 0,
    ) -> TensorSums:
        """One chunk of lane `number`, laid out as manifest.layout lays out `metadata`, into its sender's
        `bucket` (uint8); other ranks have none.

        Returns, on the sender, a function that gives what each part adds to its tensor's checksums; the
        bucket must be as it is until then. May run in a thread of its own, the same one on every rank of
        `publishing`.
        """
        local, names, taken = _by_name(pieces), list(self.slices), []
        sender, of_lane = self.lanes[number].sender, self._of_lane[number]
        for part in parts:
            slices = of_lane[names[part.tensor]]
            spans = [(s, s.below(part.first), s.below(part.last)) for s in slices]
            mine = local.get(names[part.tensor])
            if bucket is None:
                for s, first, last in spans:
                    if s.rank == dist.get_rank() and first < last:
                        views = [v.reshape(-1) for v in cut(mine.view, first, last)]
                        self.publishing.send(
                            (torch.cat(views) if len(views) > 1 else views[0]).to(dtype), sender, s.name
                        )
                continue
            target = place(bucket, part.offset, (part.last - part.first,), dtype)
            sums: list[TensorSums] = []
            for s, first, last in spans:
                if s.rank == sender:
                    sums += _pack_span(s, first, cut(mine.view, first, last), target, part.first)
                elif first < last:
                    sums += _pack_span(
                        s, first, self._received(s, first, last, target, part.first), target, part.first
                    )
            taken.append(sums)
        return lambda: [add_sums(both for read in sums for both in read()) for sums in taken]

    def _received(
        self, s: Slice, first: int, last: int, target: torch.Tensor, begin: int
    ) -> list[torch.Tensor]:
        """Another rank's items [first, last) of its slice, in pieces as `cut` makes them: in the target
        itself where they lie together."""
        at = _place(s, first) - begin
        together = s.dim == 0
        flat = (
            target[at : at + last - first]
            if together
            else torch.empty(last - first, dtype=target.dtype, device=target.device)
        )
        self.publishing.receive(flat, s.rank, s.name)
        if together:
            return [flat]
        shapes = [view.shape for view in cut(torch.empty(s.own_shape, device="meta"), first, last)]
        return [
            part.view(shape)
            for part, shape in zip(flat.split([math.prod(x) for x in shapes]), shapes, strict=True)
        ]

    def _send(self, slices: Sequence[Slice], mine: Piece | None, dtype: torch.dtype) -> None:
        """To rank 0, those of one tensor's slices that this rank holds."""
        for s in slices:
            if s.rank == dist.get_rank():
                self._exchange.send(mine.value().to(dtype).contiguous(), 0, s.name)

    def _whole(
        self, slices: list[Slice], mine: Piece | None, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if len(slices) == 1 and slices[0].rank == 0:
            return mine.value().to(dtype).contiguous()
        whole = torch.empty(slices[0].shape, dtype=dtype, device=device)
        for s in slices:
            target = whole.narrow(s.dim, s.start, s.length)
            if s.rank == 0:
                pack([mine], [target])
            else:
                target.copy_(
                    self._exchange.receive(
                        torch.empty(s.own_shape, dtype=dtype, device=device), s.rank, s.name
                    )
                )
        return whole


def cut(view: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    """Views that make up the items [first, last) of `view` in row-major order: whole rows, and what begins
    and ends inside one."""
    if first >= last or (first, last) == (0, view.numel()):
        return [view] if first < last else []
    if view.dim() == 1:
        return [view[first:last]]
    inner = view[0].numel()
    head, tail = first // inner, last // inner
    if head == tail:
        return cut(view[head], first - head * inner, last - head * inner)
    whole = head + (first % inner > 0)
    middle = [view[whole:tail]] if whole < tail else []
    before = cut(view[head], first - head * inner, inner) if whole > head else []
    return [*before, *middle, *(cut(view[tail], 0, last - tail * inner) if last % inner else [])]


def _place(s: Slice, item: int) -> int:
    """The place in the whole tensor, in row-major order, of item `item` of the slice in its own."""
    inner = math.prod(s.shape[s.dim + 1 :])
    block, inside = divmod(item, s.length * inner)
    return (block * s.shape[s.dim] + s.start) * inner + inside


def _pack_span(
    s: Slice, first: int, views: Sequence[torch.Tensor], target: torch.Tensor, begin: int
) -> list[TensorSums]:
    """Consecutive items of slice `s` from its item `first` on, as `cut` makes them, into `target`, which
    holds the whole tensor's items from `begin` on. For a slice of columns (dim 1), each view is a part of one
    row or a block of whole rows of the slice."""
    taken, numel = [], math.prod(s.shape)
    for view in views:
        place_in_whole, items = _place(s, first), view.numel()
        at, columns = place_in_whole - begin, s.shape[-1]
        if s.dim == 0 or view.dim() == 1:
            flat = Piece(s.name, (numel,), 0, place_in_whole, items, view)
            taken.append(pack([flat], [target[at : at + items]]))
        else:
            rows, row = len(view), place_in_whole - s.start
            block = target.as_strided((rows, s.length), (columns, 1), target.storage_offset() + at)
            # the sums of a block count words from the beginning of its first row
            if row * target.element_size() % 4:
                return [*taken, *_pack_span(s, first, [*view, *views[len(taken) + 1 :]], target, begin)]
            read = pack([Piece(s.name, (rows, columns), 1, s.start, s.length, view)], [block])
            taken.append(functools.partial(_shifted_by, row * target.element_size() // 4, read))
        first += items
    return taken


def _shifted_by(words: int, read: TensorSums) -> list[tuple[int, int]]:
    return [shifted(both, words) for both in read()]


def _by_name(pieces: Sequence[Piece]) -> dict[str, Piece]:
    """The first of each name: a tied embedding comes before its copy."""
    return {p.name: p for p in reversed(pieces)}


def _all_frames(frame: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """What each rank of a gloo group brought, in the order of the ranks."""
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(frame)]), group=group)
    longest = max(int(n) for n in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(n)].numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]
