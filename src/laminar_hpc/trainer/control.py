"""What the trainer ranks tell each other beside the tensors, over one gloo group of all of them: batches,
who holds which slices, what each has written of a checkpoint.

One group for all, because each is a mesh: a socket to every other rank. So only the trainer's thread uses it,
and every rank makes the same calls in the same order. Every wait is bounded by its caller.
"""

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError

_FOREVER = timedelta(days=365)  # of the group: what waits has a limit of its own
_made: list[weakref.ref[dist.ProcessGroup]] = []  # the group, while its world lives


def control_group() -> dist.ProcessGroup:
    """Collective at the first call in a world."""
    group = _made[0]() if _made else None
    if group is None or group not in dist.distributed_c10d._world.pg_map:
        group = dist.new_group(backend="gloo", timeout=_FOREVER)
        assert isinstance(group, dist.ProcessGroup)
        _made[:] = [weakref.ref(group)]
    return group


def from_first(frame: bytes, seconds: float, what: str) -> bytes:
    """Rank 0's `frame` on all ranks."""
    if dist.get_world_size() == 1:
        return frame
    size = torch.tensor([len(frame)])
    _await(dist.broadcast(size, 0, group=control_group(), async_op=True), seconds, what)
    data = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        data = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    _await(dist.broadcast(data, 0, group=control_group(), async_op=True), seconds, what)
    return data.numpy().tobytes()


def all_frames(frame: bytes, seconds: float, what: str) -> list[bytes]:
    """What each rank brought, in the order of the ranks."""
    if dist.get_world_size() == 1:
        return [frame]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    _all_gather(sizes, torch.tensor([len(frame)]), seconds, what)
    padded = torch.zeros(max(1, *(int(size) for size in sizes)), dtype=torch.uint8)
    if frame:
        padded[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in sizes]
    _all_gather(parts, padded, seconds, what)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _all_gather(parts: Sequence[torch.Tensor], own: torch.Tensor, seconds: float, what: str) -> None:
    _await(dist.all_gather(list(parts), own, group=control_group(), async_op=True), seconds, what)


def _await(work: dist.Work, seconds: float, what: str) -> None:
    try:
        work.wait(timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError) as error:
        raise LaminarError(
            f"trainer {dist.get_rank()} waited at most {seconds:.0f} s for the other trainer ranks at {what} "
            f"({str(error).splitlines()[0][:120]}); see their logs"
        ) from None
