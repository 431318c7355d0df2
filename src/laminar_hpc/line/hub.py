"""The controller's end of all channels: one encrypted ROUTER socket that admits only holders of the run's
client key.

Not a thread: the controller's loop polls it, commits, and then says `committed`, which acknowledges what had
arrived. Whoever gets in holds the run's key, so a frame that is no message is a bug or another version of
laminar_hpc: it comes out as `UnreadableMessage`, and the loop decides what ends.

A Welcome begins a session: a stream down, for which the hub keeps what the member has not acknowledged. Only
members with a session are listened to; what others say in their stream up is left unacknowledged, so it comes
again once they have joined.
"""

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.address import ControllerAddress, new_address, read_address, write_address
from laminar_hpc.line.admission import CurveAuthenticator, listen, secured_router
from laminar_hpc.line.delivery import DeliveryError, Header, Receiver, Sender, decode_header, encode_header
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import Hello, Ping, Pong, Rejoin, StopRequest, Welcome
from laminar_hpc.line.messages.wire import AnyMessage, decode, encode
from laminar_hpc.line.parcel import MESSAGE_BYTES_MAX, next_parcel, unpack
from laminar_hpc.line.spool import Spool, SpoolFull

log = logging.getLogger(__name__)
_FRAMES_AT_ONCE = 100  # between two looks at who asks for admission
# that a turn takes, behind which no ping waits longer than it takes to store so much; one frame may be larger
_BYTES_AT_ONCE = 4 << 20


@dataclass(frozen=True)
class UnreadableMessage:
    """A frame that is no message, and why."""

    reason: str


class _Session:
    """A member's two streams: `sender` has the one down, `receiver` goes on behind what the store has."""

    def __init__(self, name: str, received: int) -> None:
        self.name = name
        self.spool = Spool()
        self.sender = Sender(self.spool)
        self.receiver = Receiver(received)


@dataclass(eq=False)
class Peer:
    """What the hub knows of one identity; of most that the store knows it is `received` alone."""

    identity: str
    received: int = 0  # the newest number that the committed store knows
    arrived: int = 0  # the newest number since the last commit, 0 = none
    asks_again: bool = False  # with the next answer: for what is missing
    speaks: bool = False  # a member, or somebody with something new to say
    packs: bool = False  # it is at another place
    session: _Session | None = None  # of a member


def _read(frame: bytes) -> AnyMessage | UnreadableMessage:
    try:
        return decode(frame)
    except msgspec.DecodeError as error:
        return UnreadableMessage(str(error))


Arrived = list[tuple[str, AnyMessage | UnreadableMessage]]


class Hub:
    """Binds at construction and writes `run_dir/controller.json`."""

    def __init__(self, run_dir: Path, run_id: str, host: str, port: int, machine: str) -> None:
        self._context = zmq.Context()
        self._run_dir = run_dir
        self._address, secret = new_address(run_id, host, machine)
        self._admission = CurveAuthenticator(self._context, self._address.client_public)
        self._router = secured_router(self._context, secret, MESSAGE_BYTES_MAX)
        try:
            self._address.port = listen(self._router, host, port or "*")
        except OSError as error:
            self._context.destroy(0)
            raise LaminarError(
                f"the controller cannot listen at {host}:{port} ({error}); set cluster.port=0 or "
                "cluster.host to an address of this machine"
            ) from None
        write_address(run_dir, self._address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._admission.socket, zmq.POLLIN)

        self._peers: dict[str, Peer] = {}
        self._due: set[Peer] = set()  # answered with the next commit
        self._session_numbers = itertools.count(1)
        self._frames = self._bytes = 0  # taken so far
        # until then (monotonic seconds) everything that had come was taken; since when and frame the next
        # such moment is worked at
        self.heard_until = time.monotonic()
        self._hearing = (time.monotonic(), 0)

    @property
    def address(self) -> ControllerAddress:
        return self._address

    def announce(self, store_id: str, received: Mapping[str, int]) -> None:
        """Says in controller.json which store is served, and takes up all streams where that store left them:
        the newest number `received` of each identity."""
        for identity, number in received.items():
            self._peer(identity).received = number
        self._address.store_id = store_id
        write_address(self._run_dir, self._address)

    def show_address(self) -> None:
        """Again, if a controller that was replaced has written its own late. A file system that fails now is
        asked again with the next call."""
        try:
            shown = read_address(self._run_dir)
            if shown is None or shown.run_id != self._address.run_id:
                write_address(self._run_dir, self._address)
        except OSError as error:
            log.warning("the address of this controller in %s cannot be looked at: %s", self._run_dir, error)

    # ---- what comes ----------------------------------------------------------------------------------------

    def poll(self, seconds: float, limit: int = 1000) -> Arrived:
        """What has come, as (sender's identity, message): waits up to `seconds` for the first, then takes at
        most about `limit` frames that are there, and about _BYTES_AT_ONCE."""
        messages: Arrived = []
        timeout, taken, size = int(seconds * 1000), self._frames, self._bytes
        while max(self._frames - taken, len(messages)) < limit and self._bytes - size < _BYTES_AT_ONCE:
            events = dict(self._poller.poll(timeout))
            if not events:
                self._note_heard(all_of_it=True)
                return messages
            if self._admission.socket in events:
                self._admission.answer()
            if self._router in events:
                self._take_waiting(messages, size + _BYTES_AT_ONCE)
                timeout = 0
        self._note_heard(all_of_it=False)
        return messages

    def _note_heard(self, all_of_it: bool) -> None:
        """The socket takes one message from each peer in turn, so that after as many as there are peers each
        of them was heard that had anything to say."""
        now, (since, frame) = time.monotonic(), self._hearing
        if all_of_it:
            self.heard_until = now
            self._hearing = (now, self._frames)
        elif self._frames - frame >= 2 * sum(peer.speaks for peer in self._peers.values()):
            self.heard_until = since
            self._hearing = (now, self._frames)

    def _take_waiting(self, messages: Arrived, bytes_max: int) -> None:
        now = time.monotonic()
        for _ in range(_FRAMES_AT_ONCE):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._frames += 1
            self._bytes += sum(map(len, frames))
            name = identity.decode(errors="backslashreplace")
            try:
                found = self._take(name, frames, now)
            except (DeliveryError, msgspec.DecodeError) as error:
                messages.append((name, UnreadableMessage(str(error))))
                continue
            messages += [(name, message) for message in found]
            if self._bytes >= bytes_max:
                return

    def _take(self, name: str, frames: list[bytes], now: float) -> list[AnyMessage | UnreadableMessage]:
        if len(frames) != 2:
            raise DeliveryError(f"it has {len(frames)} parts, not a header and a message")
        header, payload = decode_header(frames[0]), frames[1]
        peer = self._peer(name)
        session = peer.session
        if session is not None and header.session == session.name:
            self._hear(peer, session, header)
        if header.seq:
            new = self._new(peer, header, now)
            return [_read(frame) for frame in unpack(header, payload)[-new:]] if new else []
        if session is not None and session.receiver.misses(header.sent, now):
            self._answer(peer, again=True)
        if not payload:
            return []
        message = decode(payload)
        if not isinstance(message, Hello | Ping | StopRequest):
            raise DeliveryError(f"a {type(message).__name__} without a number")
        if isinstance(message, Hello):
            peer.packs = bool(message.place)
        return [message]

    def _peer(self, identity: str) -> Peer:
        if (peer := self._peers.get(identity)) is None:
            peer = self._peers[identity] = Peer(identity)
        return peer

    def _hear(self, peer: Peer, session: _Session, header: Header) -> None:
        session.sender.acknowledged(header.ack)
        if header.again:
            session.sender.rewind()
        self._transmit(peer, session)

    def _new(self, peer: Peer, header: Header, now: float) -> int:
        """How many of the numbered messages that come with it are to be taken, the last ones."""
        seq = header.seq
        if peer.session is None:
            if seq <= peer.received:  # its Goodbye, most likely
                self._answer(peer)
            else:
                peer.speaks = True
            return 0
        receiver = peer.session.receiver
        if new := receiver.take(seq, header.messages):
            peer.arrived = seq
            self._answer(peer)
            return new
        self._answer(peer, receiver.misses(seq, now))
        return 0

    def _answer(self, peer: Peer, again: bool = False) -> None:
        """With the next commit."""
        peer.asks_again |= again
        self._due.add(peer)

    # ---- what is acknowledged ------------------------------------------------------------------------------

    def received(self) -> dict[str, int]:
        """By identity, the newest number since the last `committed`: for the transaction with the effects."""
        return {peer.identity: peer.arrived for peer in self._due if peer.arrived}

    def committed(self) -> None:
        """What has arrived is in the store for good: acknowledges it."""
        for peer in self._due:
            peer.received = peer.arrived or peer.received
            peer.arrived = 0
            self._put(peer, 0, b"", peer.asks_again)
            peer.asks_again = False
        self._due.clear()

    # ---- what goes -----------------------------------------------------------------------------------------

    def send(self, identity: str, message: Message) -> None:
        """Queues a message for a member, which it reaches once; for one that is no member it is sent once,
        and may be lost. A Welcome makes a member."""
        peer = self._peer(identity)
        if isinstance(message, Welcome):
            if peer.session is None:  # else it has said Hello twice, or has not had its Welcome
                name = f"{self._address.run_id}#{next(self._session_numbers)}"
                peer.session = _Session(name, peer.received)
                peer.speaks = True
            message = msgspec.structs.replace(message, received=peer.received)
        if peer.session is None or isinstance(message, Welcome | Rejoin | Pong):
            self._put(peer, 0, encode(message))
            return
        try:
            peer.session.sender.push(encode(message))
        except (SpoolFull, OSError) as error:
            raise LaminarError(f"what waits for {identity} cannot be kept: {error}") from None
        self._transmit(peer, peer.session)

    def end(self, identity: str) -> None:
        """It is no member any more. Called when all that was taken of it is committed."""
        peer = self._peer(identity)
        if peer.session is not None:
            peer.session.spool.close()
        peer.session = None
        peer.speaks = False

    def _transmit(self, peer: Peer, session: _Session) -> None:
        while (due := next_parcel(session.sender, peer.packs)) is not None:
            session.sender.advance(due.last)
            self._put(peer, due.last, due.payload, packed=due.packed)

    def _put(self, peer: Peer, number: int, frame: bytes, again: bool = False, packed: int = 0) -> None:
        name, sent = (peer.session.name, peer.session.sender.sent) if peer.session else ("", 0)
        header = Header(name, number, sent, peer.received, again, packed)
        self._router.send_multipart([peer.identity.encode(), encode_header(header), frame], zmq.NOBLOCK)

    def close(self) -> None:
        for identity in list(self._peers):
            self.end(identity)
        self._router.close()
        self._admission.close()
        self._context.term()
