"""The frames of a stream of changes, as they come over a link: while one is looked at, the next one arrives.
Used by weights/relay/chain.py.

    host memory     gloo -> memory of the frame's own, or for a full one its place in the slot
    from a device   NCCL -> one of the staging's chunks -> pinned memory
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from laminar_hpc.weights.delta import FULL, Frame, FrameWrong, payload_bytes
from laminar_hpc.weights.links.links import Link, Posted


class _Posted(NamedTuple):
    """A frame whose head is here and whose payload is on its way into `target`."""

    head: torch.Tensor
    target: torch.Tensor
    work: Posted
    placed: bool  # the target is its place in the slot


def arriving_frames(
    link: Link, parts: Sequence[torch.Tensor], width: int, keeps: bool
) -> Iterator[tuple[Frame, bool]]:
    """Of each of `parts`, the slot's chunks in units of `width` bytes: its frame, with the payload on the
    host, and whether that is in its place already. A payload is valid until the next one is asked for; with
    `keeps`, for ever, but of a full one.

    Raises LinkBroken, and FrameWrong for a frame that no sender makes.
    """
    ahead = _post(link, parts[0], width, parts[0].numel(), 0)
    for number in range(len(parts)):
        posted = ahead
        if number + 1 < len(parts):
            ahead = _post(link, parts[number + 1], width, parts[0].numel(), number + 1)
        payload = link.finish(posted.work, posted.target)
        if link.device_end is not None:
            size = payload.numel()
            host = link.device_end.staging(parts[0].numel()).host(number, size)
            link.reach(link.device_end.copy(host, payload))
            payload = host.clone() if keeps and int(posted.head[0]) != FULL else host
        yield Frame(posted.head, payload), posted.placed


def _post(link: Link, part: torch.Tensor, width: int, chunk: int, number: int) -> _Posted:
    """Waits for the head of the frame that becomes `part`, and gets ready for its payload."""
    head = torch.zeros(2, dtype=torch.int64)
    kind, changed = link.receive(head).tolist()
    length = payload_bytes(kind, changed, part.numel() // width, width)
    if link.device_end is None:
        target = part if kind == FULL else link.memory(length)
    elif length <= chunk:
        target = link.device_end.staging(chunk).device(number, length)
    else:
        raise FrameWrong(f"changes to a chunk of {part.numel()} bytes came as {length} bytes")
    return _Posted(head, target, link.post(target), target is part)
