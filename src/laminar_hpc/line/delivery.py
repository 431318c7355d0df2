"""Each message once and in order, over cuts, lost frames and a controller that starts again: two pure state
machines and the header that they speak by. line/worker_line.py and line/hub.py drive them.

    sender    push -> backlog -> peek, advance -> on the wire -> acknowledged -> forgotten
    receiver  take(expected) -> acknowledged (by the controller: after its commit)

A member has one stream up, named by its identity; it outlives connections and controllers. A stream down
begins with each Welcome and is named by the header's `session`. docs/delivery.md has the protocol.

Invariants: a number names one message for good; a receiver takes numbers in order, each once; a sender
forgets what was acknowledged and nothing else; at most WINDOW_FRAMES are on the wire.
"""

import math
from collections.abc import Iterator

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.spool import Spool

WINDOW_FRAMES = 1024  # a turn of the controller takes about so many
WINDOW_BYTES = 32 << 20  # one frame may be larger
AGAIN_SECONDS = 2.0  # between two requests to send the same number again


class Header(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Before every message. `seq`: its number, 0 = in no stream. `sent`: the newest number that is on the
    wire before or with it. `ack`: the newest number that was taken from the other side. `again`: send all
    behind `ack` once more. `packed`: so many messages, the last of which has number `seq`, are in its payload
    (line/parcel.py); 0: it is one."""

    session: str
    seq: int
    sent: int
    ack: int
    again: bool = False
    packed: int = 0

    @property
    def messages(self) -> int:
        """How many are in its payload."""
        return max(1, self.packed)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    """The first frame of a message."""
    return _encoder.encode(header)


def decode_header(frame: bytes) -> Header:
    """Raises DeliveryError on anything else."""
    try:
        header = _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DeliveryError(f"it has no header ({error})") from None
    if not 0 <= header.packed <= header.seq <= header.sent or header.ack < 0:
        raise DeliveryError(f"its header makes no sense ({header})")
    return header


class DeliveryError(LaminarError):
    """The other side breaks the protocol: a bug, another version, or a store that has forgotten."""


class Sender:
    """One stream's sending end."""

    def __init__(self, backlog: Spool) -> None:
        self._backlog = backlog
        self._kept: dict[int, bytes] = {}  # numbered, not yet acknowledged
        self._kept_bytes = 0
        self._numbered = 0  # the newest number given
        self.sent = 0  # the newest number on the wire since the last rewind
        self.acked = 0

    @property
    def idle(self) -> bool:
        """All was acknowledged."""
        return not self._kept and not self._backlog

    def push(self, frame: bytes) -> None:
        self._backlog.append(frame)

    def unacknowledged(self) -> Iterator[bytes]:
        """All that the other side may not have, from number `acked` + 1 on. The stream ends with it."""
        yield from (frame for _, frame in sorted(self._kept.items()))
        while self._backlog:
            yield self._backlog.popleft()

    def peek(self, ahead: int = 0) -> tuple[int, bytes] | None:
        """What goes on the wire next, or the message `ahead` of it, with its number; None while the window is
        full or nothing waits."""
        number = self.sent + 1 + ahead
        if number > self._numbered:
            full = len(self._kept) >= WINDOW_FRAMES or self._kept_bytes >= WINDOW_BYTES
            if full or not self._backlog:
                return None
            frame = self._backlog.popleft()
            self._numbered = number
            self._kept[number] = frame
            self._kept_bytes += len(frame)
        return number, self._kept[number]

    def advance(self, number: int) -> None:
        """What `peek` gave, up to this number, is on the wire."""
        self.sent = number

    def acknowledged(self, number: int) -> None:
        """Raises DeliveryError for a number that was never sent."""
        if number > self._numbered:
            raise DeliveryError(f"it acknowledges message {number} of {self._numbered}")
        while self.acked < number:
            self.acked += 1
            self._kept_bytes -= len(self._kept.pop(self.acked))
        self.sent = max(self.sent, self.acked)

    def rewind(self) -> None:
        """All that was not acknowledged goes on the wire again."""
        self.sent = self.acked

    def resume(self, received: int) -> None:
        """Goes on behind `received`, with a receiver that begins or has started again. Raises DeliveryError
        when it no longer knows what it has acknowledged, or knows what was never sent."""
        if received > self._numbered:
            raise DeliveryError(
                f"the controller knows {received} messages under this process's name, which has sent "
                f"{self._numbered}: another process has the same name"
            )
        if received < self.acked:
            raise DeliveryError(
                f"the controller's store knows messages up to {received}, but {self.acked} were "
                "acknowledged: it is older than what this process has been told"
            )
        self.acknowledged(received)
        self.rewind()


class Receiver:
    """One stream's receiving end. `received`: the newest number taken."""

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self._asked = 0
        self._asked_at = -math.inf

    def take(self, number: int, count: int = 1) -> int:
        """How many of the `count` messages up to this number are the next ones, and now count as taken; 0
        where one before them is missing. Raises DeliveryError for a number that no sender could have
        reached."""
        if number > self.received + WINDOW_FRAMES:
            raise DeliveryError(f"it is message {number} where {self.received + 1} is due")
        new = number - self.received
        if not 0 < new <= count:
            return 0
        self.received = number
        return new

    def misses(self, sent: int, now: float) -> bool:
        """Whether to ask again for all behind `received`: the sender has put `sent` on the wire, in order."""
        if sent <= self.received:
            return False
        due = self.received + 1
        if due == self._asked and now - self._asked_at < AGAIN_SECONDS:
            return False
        self._asked = due
        self._asked_at = now
        return True
