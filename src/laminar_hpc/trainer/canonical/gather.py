"""The live weights under Hugging Face names, put together from the shards that all trainer ranks hold.

Used by trainer/megatron/policy.py: `pack` for publishing, on the rank that sends a lane; `tensors` for
checkpoints, on rank 0. At the start every rank says which slices it holds; of those that several ranks hold
(replicas, norms, the copy of a tied embedding) only one is taken: that of the rank where they are put
together, else the first rank's. So each byte comes there once.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.trainer.canonical.exchange import Exchange
from laminar_hpc.trainer.canonical.plan import HeldSlice, gathered_lane, plan, plan_lanes
from laminar_hpc.trainer.control import all_frames
from laminar_hpc.weights.experts import is_expert
from laminar_hpc.weights.kernels import pack, place
from laminar_hpc.weights.kernels.slices import LocalSlice, SliceKey, by_key
from laminar_hpc.weights.kernels.sums import LazySums, add_sums, shifted
from laminar_hpc.weights.lanes import Lane
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.stream import TensorSpan

log = logging.getLogger(__name__)


class Canonical:
    """Collective over the trainer world: making one, and running through `tensors` or `pack`."""

    def __init__(
        self,
        local: Sequence[LocalSlice],
        dtype: torch.dtype,
        lanes: int,
        seconds: float,
        publish_seconds: float,
    ) -> None:
        """`local`: the slices of this rank, published in `dtype`; `seconds` bounds each wait for another
        rank, and `publish_seconds` those of a rank for a relay."""
        held = _held_by_all(local if lanes > 1 else _of_first_replica(local), seconds)
        self.slices = plan(held)
        whole = layout(self.metadata(dtype), 0, 0)
        self._lanes = [
            gathered_lane(lane, held, self.slices, whole)
            for lane in plan_lanes(held, self.slices, whole, lanes)
        ]
        if dist.get_rank() == 0 and lanes > 1:
            for number, (lane, gathered) in enumerate(zip(self.lanes, self.gathered_bytes, strict=True)):
                size = lane.end - lane.begin
                share = 100 * gathered / size
                text = "lane %d: %d bytes leave trainer %d, which gathers %.0f%% of them"
                log.info(text, number, size, lane.sender, share)
        holders = {0, *(s.rank for slices in self.slices.values() for s in slices)}
        taking = {0, *(lane.sender for lane in self.lanes)}.union(*(lane.bytes_of for lane in self._lanes))
        self._exchange = Exchange(sorted(holders), seconds)
        self.publishing = Exchange(sorted(taking), seconds + publish_seconds)
        self._kept: list[LocalSlice] = []

    @property
    def lanes(self) -> list[Lane]:
        """Which rank sends which bytes."""
        return [each.lane for each in self._lanes]

    @property
    def gathered_bytes(self) -> list[int]:
        """Counts, for each lane, the bytes that ranks other than its sender bring."""
        return [
            sum(nbytes for rank, nbytes in each.bytes_of.items() if rank != each.lane.sender)
            for each in self._lanes
        ]

    def metadata(self, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, whole shape and `dtype` of every tensor of the model, in the order of a Hugging Face state
        dict. On every rank."""
        return [(name, slices[0].shape, dtype) for name, slices in self.slices.items()]

    def tensors(
        self, local: Sequence[LocalSlice], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 the tensors, whole, contiguous, as `metadata` lists them: views of the parameters where
        one rank holds all and the layouts agree, else on `device`. The other ranks send their slices and get
        nothing, but must run through."""
        own = by_key(local)
        for name, slices in self.slices.items():
            if dist.get_rank() == 0:
                yield name, self._whole(slices, own, dtype, device)
            else:
                self._send(slices, own, dtype)

    def keep(self, local: Sequence[LocalSlice]) -> None:
        """Copies what this rank brings to publications; from then on `pack` reads the copies. Enqueued to the
        current stream. Not collective."""
        own = by_key(local)
        if not self._kept:
            brought = {
                s.name
                for lane in self._lanes
                for of_tensor in lane.slices.values()
                for s in of_tensor
                if s.rank == dist.get_rank()
            }
            self._kept = [
                replace(s, view=torch.empty_like(s.view)) for s in own.values() if s.name in brought
            ]
        for copy in self._kept:
            copy.view.copy_(own[copy.key].view)

    def pack(
        self,
        local: Sequence[LocalSlice],
        dtype: torch.dtype,
        spans: Sequence[TensorSpan],
        bucket: torch.Tensor | None,
        number: int = 0,
    ) -> LazySums:
        """One chunk of lane `number`, laid out as manifest.layout lays out `metadata`, into its sender's
        `bucket` (uint8); other ranks have none.

        Returns, on the sender, a function that gives what each span adds to its tensor's checksums; the
        bucket must be as it is until then. May run in a thread of its own, the same one on every rank of
        `publishing`.
        """
        own, pieces = by_key(self._kept or local), list(self._pieces(spans, number))
        parts: list[_Packed] = []
        sender = self._lanes[number].lane.sender
        if bucket is None:
            views = [
                view.reshape(-1).to(dtype)
                for _, s, first, last in pieces
                if s.rank == dist.get_rank()
                for view in cut(own[s.key].view, first, last)
            ]
            if views:
                values = torch.cat(views) if len(views) > 1 else views[0]
                self.publishing.send(values, sender, "its slices of a chunk")
            return list
        arrived = self._arrived(pieces, sender, dtype, bucket.device)
        for index, s, first, last in pieces:
            span = spans[index]
            if s.rank == sender:
                views = cut(own[s.key].view, first, last)
            else:
                flat, arrived[s.rank] = arrived[s.rank].tensor_split([last - first])
                views = _as_cut(s, first, last, flat)
            target = place(bucket, span.offset, (span.last - span.first,), dtype)
            parts += _parts(index, s, first, views, target, span.first)
        read = pack([part.local for part in parts], [part.target for part in parts])
        belongs = [(part.span, part.words) for part in parts]  # without what was received

        def sums() -> list[tuple[int, int]]:
            of_spans: list[list[tuple[int, int]]] = [[] for _ in spans]
            for (index, words), both in zip(belongs, read(), strict=True):
                of_spans[index].append(shifted(both, words))
            return [add_sums(both) for both in of_spans]

        return sums

    def _pieces(self, spans: Sequence[TensorSpan], number: int) -> Iterator[tuple[int, HeldSlice, int, int]]:
        """What a chunk of lane `number` is made of: number of the span, slice, and its items [first, last);
        in the same order on all ranks."""
        names, of_lane = list(self.slices), self._lanes[number].slices
        for index, span in enumerate(spans):
            for s in of_lane[names[span.tensor]]:
                first, last = s.below(span.first), s.below(span.last)
                if first < last:
                    yield index, s, first, last

    def _arrived(
        self,
        pieces: Sequence[tuple[int, HeldSlice, int, int]],
        sender: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> dict[int, torch.Tensor]:
        """Of each other rank what it brings to a chunk, one piece behind the other, flat."""
        items: Counter[int] = Counter()
        for _, s, first, last in pieces:
            items[s.rank] += last - first
        return {
            rank: self.publishing.receive(
                torch.empty(count, dtype=dtype, device=device), rank, "its slices of a chunk"
            )
            for rank, count in sorted(items.items())
            if rank != sender
        }

    def _send(self, slices: Sequence[HeldSlice], own: dict[SliceKey, LocalSlice], dtype: torch.dtype) -> None:
        """To rank 0, those of one tensor's slices that this rank holds."""
        for s in slices:
            if s.rank == dist.get_rank():
                self._exchange.send(own[s.key].value().to(dtype).contiguous(), 0, s.name)

    def _whole(
        self,
        slices: list[HeldSlice],
        own: dict[SliceKey, LocalSlice],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        if len(slices) == 1 and slices[0].rank == 0:
            return own[slices[0].key].value().to(dtype).contiguous()
        whole = torch.empty(slices[0].shape, dtype=dtype, device=device)
        for s in slices:
            target = whole.narrow(s.dim, s.start, s.length)
            if s.rank == 0:
                pack([own[s.key]], [target])
            else:
                values = torch.empty(s.slice_shape, dtype=dtype, device=device)
                target.copy_(self._exchange.receive(values, s.rank, s.name))
        return whole


def _of_first_replica(local: Sequence[LocalSlice]) -> list[LocalSlice]:
    """Without what a data- or context-parallel rank before this one holds; of experts other ranks may be
    replicas."""
    dense = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    experts = parallel_state.get_expert_data_parallel_rank() == 0
    return [s for s in local if (experts if is_expert(s.name) else dense)]


def _held_by_all(local: Sequence[LocalSlice], seconds: float) -> list[HeldSlice]:
    """The slices that each rank names, in the order of the ranks. Collective over the trainer world."""
    rank = dist.get_rank()
    own = [HeldSlice(s.name, s.shape, s.dim, s.start, s.length, rank) for s in local]
    frames = all_frames(msgspec.json.encode(own), seconds, "the list of slices")
    return [s for frame in frames for s in msgspec.json.decode(frame, type=list[HeldSlice])]


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


def _as_cut(s: HeldSlice, first: int, last: int, flat: torch.Tensor) -> list[torch.Tensor]:
    """The items [first, last) of a slice, which lie in `flat`, as `cut` makes them of the slice."""
    shapes = [view.shape for view in cut(torch.empty(s.slice_shape, device="meta"), first, last)]
    views = flat.split([math.prod(shape) for shape in shapes])
    return [view.view(shape) for view, shape in zip(views, shapes, strict=True)]


class _Packed(NamedTuple):
    """What is packed at once. Its sums count words from `words` words behind the tensor's beginning."""

    span: int
    local: LocalSlice
    target: torch.Tensor
    words: int


def _parts(
    span: int, s: HeldSlice, first: int, views: Sequence[torch.Tensor], target: torch.Tensor, begin: int
) -> Iterator[_Packed]:
    """Consecutive items of slice `s` from its item `first` on, as `cut` makes them, and their places in
    `target`, which holds the whole tensor's items from `begin` on. For a slice of columns (dim 1), each view
    is a part of one row or a block of whole rows of the slice."""
    numel, left = math.prod(s.shape), list(views)
    while left:
        view = left.pop(0)
        place_in_whole, items = s.place(first), view.numel()
        at, columns = place_in_whole - begin, s.shape[-1]
        row = place_in_whole - s.start
        if s.dim == 0 or view.dim() == 1:
            flat = LocalSlice(s.name, (numel,), 0, place_in_whole, items, view)
            yield _Packed(span, flat, target[at : at + items], 0)
        elif row * target.element_size() % 4:
            # the sums of a block count words from the beginning of its first row
            left = [*view, *left]
            continue
        else:
            block = target.as_strided((len(view), s.length), (columns, 1), target.storage_offset() + at)
            local = LocalSlice(s.name, (len(view), columns), 1, s.start, s.length, view)
            yield _Packed(span, local, block, row * target.element_size() // 4)
        first += items
