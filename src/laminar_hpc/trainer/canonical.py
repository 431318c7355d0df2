"""The live weights under Hugging Face names, put together on trainer rank 0 from the shards that all trainer ranks hold.

Used by trainer/megatron.py: `pack` for publishing, `tensors` for checkpoints. At the start every rank says which slices it holds; of those
that several ranks hold (replicas, norms, the copy of a tied embedding) only the first rank's is taken, so each byte comes to rank 0 once.
Every wait is bounded.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.kernels import Sums, pack, place
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.mapping import Piece
from laminar_hpc.weights.sums import add_sums


class Slice(msgspec.Struct, frozen=True):
    """Elements [start, start + length) along `dim` of the tensor `name`, whose whole shape is `shape`; `rank` holds them."""

    rank: int
    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    length: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])


def plan(held: Iterable[Slice]) -> dict[str, list[Slice]]:
    """Slices by tensor that make it up without overlap, the first holder's of equal ones; tensors in the order of first mention.

    `held` in the order of the ranks, so the order is that of the pipeline's stages. Raises LaminarError when a tensor has a gap.
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
            raise LaminarError(f"the trainer ranks' slices of {name} do not make it up: {[(s.rank, s.start, s.length) for s in slices]}")
    return tensors


class Canonical:
    """Collective over the trainer world: making one, and running through `tensors`."""

    def __init__(self, pieces: Sequence[Piece], seconds: float) -> None:
        """`pieces` of this rank; `seconds` bounds each wait for another rank."""
        self._seconds = seconds
        limit = timedelta(seconds=seconds)
        rank, everyone = dist.get_rank(), dist.new_group(backend="gloo", timeout=limit)
        first = parallel_state.get_data_parallel_rank() == 0  # the other replicas hold the same
        mine = [Slice(rank, p.name, p.shape, p.dim, p.start, p.length) for p in pieces] if first else []
        held = [msgspec.json.decode(frame, type=list[Slice]) for frame in _all_frames(msgspec.json.encode(mine), everyone)]
        self.slices = plan(s for of_rank in held for s in of_rank)
        self._group = dist.new_group([r for r, of_rank in enumerate(held) if of_rank], timeout=limit)

    def metadata(self, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, whole shape and `dtype` of every tensor of the model, in the order of a Hugging Face state dict. On every rank."""
        return [(name, slices[0].shape, dtype) for name, slices in self.slices.items()]

    def tensors(self, pieces: Sequence[Piece], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 the tensors, whole, contiguous, as `metadata` lists them: views of the parameters where one rank holds all and the
        layouts agree, else on `device`. The other ranks send their slices and get nothing, but must run through."""
        local = _by_name(pieces)
        for name, slices in self.slices.items():
            if dist.get_rank() == 0:
                yield name, self._whole(slices, local.get(name), dtype, device)
            else:
                self._send(slices, local.get(name), dtype)

    def pack(self, pieces: Sequence[Piece], dtype: torch.dtype, bucket: torch.Tensor | None) -> Sums:
        """Every tensor to its place in rank 0's `bucket` (uint8, laid out as manifest.layout lays out `metadata`); other ranks have none.

        Returns, on rank 0, a function that gives the checksums of each tensor; the bucket must be as it is until then.
        """
        local, taken = _by_name(pieces), []
        for entry in layout(self.metadata(dtype), 0, 0).tensors:
            slices, mine = self.slices[entry.name], local.get(entry.name)
            if bucket is None:
                self._send(slices, mine, dtype)
                continue
            whole = place(bucket, entry.offset, entry.shape, dtype)
            targets = [whole.narrow(s.dim, s.start, s.length) for s in slices]
            sources = [mine if s.rank == 0 else self._received(s, target) for s, target in zip(slices, targets, strict=True)]
            taken.append(pack(sources, targets))
        return lambda: [add_sums(sums()) for sums in taken]

    def _received(self, s: Slice, target: torch.Tensor) -> Piece:
        """Another rank's slice: in the target itself where that is contiguous, else beside it."""
        part = target if target.is_contiguous() else torch.empty(s.own_shape, dtype=target.dtype, device=target.device)
        self._bounded(dist.recv, part, s.rank, s)
        return Piece(s.name, s.shape, s.dim, s.start, s.length, part)

    def _send(self, slices: Sequence[Slice], mine: Piece | None, dtype: torch.dtype) -> None:
        """To rank 0, those of one tensor's slices that this rank holds."""
        for s in slices:
            if s.rank == dist.get_rank():
                self._bounded(dist.send, mine.value().to(dtype).contiguous(), 0, s)

    def _whole(self, slices: list[Slice], mine: Piece | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if len(slices) == 1 and slices[0].rank == 0:
            return mine.value().to(dtype).contiguous()
        whole = torch.empty(slices[0].shape, dtype=dtype, device=device)
        for s in slices:
            target = whole.narrow(s.dim, s.start, s.length)
            pack([mine if s.rank == 0 else self._received(s, target)], [target])
        return whole

    def _bounded(self, send_or_receive: object, tensor: torch.Tensor, peer: int, what: Slice) -> None:
        try:
            send_or_receive(tensor, peer, group=self._group)
        except (dist.DistError, RuntimeError) as error:
            raise LaminarError(
                f"trainer {dist.get_rank()} waited at most {self._seconds:.0f} s for trainer {peer} to pass {what.name} along "
                f"({str(error).splitlines()[0][:120]}); see that rank's log"
            ) from None


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
