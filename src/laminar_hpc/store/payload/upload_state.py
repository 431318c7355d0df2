"""Which bytes of a rollout's payload files go next to the controller's side, and which are there: no socket,
no thread. store/payload/upload.py drives it.

    add -> next, advance -> on the wire -> told -> pieces that are stored

Invariants: files go one after the other, each from its beginning to its end; stored <= sent, and at most
WINDOW_BYTES apart; a piece is over when all its bytes are stored.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import ResponsePlace

WINDOW_BYTES = 8 << 20  # on the wire: more than a fast line holds over a long way
CHUNK_BYTES = 256 << 10


class UploadPiece(NamedTuple):
    """A response with what lies behind it, which ends at `end`. `future` gets the place once it is stored."""

    place: ResponsePlace
    end: int
    future: "Future[ResponsePlace]"


class Chunk(NamedTuple):
    """Bytes of a file."""

    file: str
    offset: int
    size: int


class UploadState:
    """Pieces come in the order of their files and offsets."""

    def __init__(self) -> None:
        self._pieces: deque[UploadPiece] = deque()
        self.file = ""  # the present one
        self._end = 0  # of what waits in it
        self.sent = 0  # bytes of it
        self.stored = 0
        self._reached = 0  # the newest byte that was ever sent

    @property
    def waits(self) -> bool:
        """Not all is stored."""
        return bool(self._pieces)

    @property
    def under_way(self) -> bool:
        """There are bytes that were sent and that nobody has told to be stored."""
        return self.sent > self.stored

    def add(self, piece: UploadPiece) -> None:
        self._pieces.append(piece)
        if piece is self._pieces[0] and piece.place.file != self.file:
            self._begin(piece.place.file)
        if piece.place.file == self.file:
            self._end = piece.end

    def next(self) -> Chunk | None:
        """None while the window is full or nothing waits."""
        size = min(CHUNK_BYTES, self._end - self.sent, WINDOW_BYTES - (self.sent - self.stored))
        return Chunk(self.file, self.sent, size) if size > 0 else None

    def advance(self, chunk: Chunk) -> None:
        """It is on the wire."""
        self.sent += chunk.size
        self._reached = max(self._reached, self.sent)

    def told(self, file: str, size: int, all_arrived: bool = False) -> list[UploadPiece]:
        """`size` bytes of a file are stored; returns the pieces that are over. `all_arrived`: nothing is on
        its way, so what is missing goes again. Raises LaminarError when the other side knows more than was
        sent, or has lost what it had stored."""
        if file != self.file:
            return []  # of an earlier file, late
        if size > self._reached:
            raise LaminarError(f"{file} has {size} bytes there, and {self._reached} were sent to it")
        if all_arrived and size < self.stored:
            raise LaminarError(f"{file} has {size} bytes there, and had {self.stored}: it was cut or removed")
        self.stored = max(self.stored, size)
        # what a broken connection had still carried may arrive behind what was sent again
        self.sent = size if all_arrived else max(self.sent, size)
        over = list[UploadPiece]()
        while self._pieces and self._pieces[0].place.file == file and self._pieces[0].end <= self.stored:
            over.append(self._pieces.popleft())
        if self._pieces and self._pieces[0].place.file != file:
            self._begin(self._pieces[0].place.file)
        return over

    def drop(self) -> Sequence[UploadPiece]:
        """All that is not stored; it will not be."""
        dropped = list(self._pieces)
        self._pieces.clear()
        return dropped

    def _begin(self, file: str) -> None:
        self.file = file
        self.sent = self.stored = self._reached = 0
        self._end = max((piece.end for piece in self._pieces if piece.place.file == file), default=0)
