"""How tensors get from one trainer rank to another beside the training: through host memory.

    holder    device --copy--> a piece of its window --its place, over gloo--> taker --copy--> device
              <-- an answer: the piece may be filled again --

Never by NCCL: its kernels wait on the device for those of the other rank. The training's collectives do the
same in an order of their own, so two ranks could each wait for the other for ever. Copies wait for nobody. A
taker that cannot map the window, as on another machine, gets the pieces over gloo. Used by exchange.py.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.links.streams import Streams, settle, streams_of
from laminar_hpc.weights.links.window import Window, mapped

PIECE_BYTES = 4 << 20
PIECES = 4  # of a window: the holder fills one while the taker reads another
_TICKET_BYTES = 512
_TICKET, _NOTE, _ANSWER, _DATA = range(1, 5)  # tags of messages


class _PieceLeft(NamedTuple):
    """A piece that its taker has not answered for; what gloo still reads is kept."""

    answer: dist.Work
    sent: list[dist.Work]
    kept: list[torch.Tensor]


class _ToTaker:
    """This rank's window for one other rank."""

    def __init__(self, group: dist.ProcessGroup, peer: int, streams: Streams) -> None:
        self._group = group
        self._peer = peer
        self._window = Window(PIECES * PIECE_BYTES)
        streams.pin(self._window.tensor)
        self._leaving = deque[_PieceLeft]()
        self._number = 0
        ticket = torch.frombuffer(bytearray(self._window.ticket.ljust(_TICKET_BYTES)), dtype=torch.uint8)
        dist.send(ticket, peer, group, _TICKET)
        answer = torch.zeros(1, dtype=torch.int64)
        dist.recv(answer, peer, group, _ANSWER)
        self._maps = bool(answer.item())

    def piece(self, size: int) -> torch.Tensor:
        """Where the next `size` bytes go, as soon as the taker has copied what lay there."""
        if len(self._leaving) == PIECES:
            self._end(self._leaving.popleft())
        begin = self._number % PIECES * PIECE_BYTES
        self._number += 1
        return self._window.tensor[begin : begin + size]

    def leave(self, piece: torch.Tensor) -> None:
        """The piece is filled."""
        note = torch.tensor([self._window.place(piece), piece.numel()])
        answer = torch.zeros(1, dtype=torch.int64)
        sent = [dist.isend(note, self._peer, self._group, _NOTE)]
        if not self._maps:
            sent.append(dist.isend(piece, self._peer, self._group, _DATA))
        works = [work for work in sent if work is not None]
        awaited = dist.irecv(answer, self._peer, self._group, _ANSWER)
        assert awaited is not None
        self._leaving.append(_PieceLeft(awaited, works, [note, answer]))

    def _end(self, leaving: _PieceLeft) -> None:
        for work in (*leaving.sent, leaving.answer):
            work.wait()


class _FromHolder:
    """Another rank's window for this one."""

    def __init__(self, group: dist.ProcessGroup, peer: int, streams: Streams) -> None:
        self._group = group
        self._peer = peer
        ticket = torch.zeros(_TICKET_BYTES, dtype=torch.uint8)
        dist.recv(ticket, peer, group, _TICKET)
        self._there = mapped(ticket.numpy().tobytes())
        self._stage = streams.pinned(PIECE_BYTES) if self._there is None else None
        if self._there is not None:
            streams.pin(self._there)
        dist.send(torch.tensor([int(self._there is not None)]), peer, group, _ANSWER)

    def piece(self, size: int) -> torch.Tensor:
        """The next `size` bytes; they stay until `taken`."""
        note = torch.zeros(2, dtype=torch.int64)
        dist.recv(note, self._peer, self._group, _NOTE)
        first, there = note.tolist()
        window = PIECES * PIECE_BYTES
        if there != size or not 0 <= first <= window - size:
            raise LaminarError(
                f"trainer {self._peer} passed bytes {first} to {first + there} of its window where {size} "
                "were due; see its log"
            )
        if self._there is not None:
            return self._there[first : first + size]
        assert self._stage is not None
        dist.recv(self._stage[:size], self._peer, self._group, _DATA)
        return self._stage[:size]

    def taken(self) -> None:
        """The holder may fill the piece again."""
        dist.send(torch.zeros(1, dtype=torch.int64), self._peer, self._group, _ANSWER)


class HostPassing:
    """Over a gloo group, whose time limit bounds every wait for a rank; `seconds` bounds those for this
    rank's device. A pair of ranks meets at the first tensor that passes between them. One thread uses it."""

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._group = group
        self._seconds = seconds
        self._takers: dict[int, _ToTaker] = {}
        self._holders: dict[int, _FromHolder] = {}

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """The contiguous `tensor`, of any device, to rank `peer`, which takes it by `receive`; on return it
        has been read. Raises RuntimeError, and LaminarError when the device is late."""
        streams = streams_of(tensor.device)
        if peer not in self._takers:
            self._takers[peer] = _ToTaker(self._group, peer, streams)
        taker = self._takers[peer]
        for part in tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            piece = taker.piece(part.numel())
            streams.copy(piece, part)
            settle(streams, self._seconds, f"a copy for trainer {peer}")
            taker.leave(piece)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        """Into the contiguous `tensor`, of any device, what rank `peer` sends of the same size; on return it
        is there. Raises as `send`."""
        streams = streams_of(tensor.device)
        if peer not in self._holders:
            self._holders[peer] = _FromHolder(self._group, peer, streams)
        holder = self._holders[peer]
        for part in tensor.view(-1).view(torch.uint8).split(PIECE_BYTES):
            streams.copy(part, holder.piece(part.numel()))
            settle(streams, self._seconds, f"a copy of trainer {peer}'s")
            holder.taken()
