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
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.cluster.address import ControllerAddress, new_address, read_address, write_address
from laminar_hpc.cluster.admission import Admission
from laminar_hpc.cluster.delivery import DeliveryError, Header, Receiver, Sender, decode_header, encode_header
from laminar_hpc.cluster.spool import Spool, SpoolFull
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.messages.data import Message
from laminar_hpc.messages.membership import Hello, Ping, Pong, Rejoin, StopRequest, Welcome
from laminar_hpc.messages.wire import AnyMessage, decode, encode

log = logging.getLogger(__name__)
_FRAMES_AT_ONCE = 100  # between two looks at who asks for admission
# that a turn takes, behind which no ping waits longer than it takes to store so much; one frame may be larger
_BYTES_AT_ONCE = 4 << 20
# A stranger that does not say who it is gives its place back after this; so does a member that meets a
# controller in a long turn, and it comes again.
_HANDSHAKE_SECONDS = 5.0
_MESSAGE_BYTES_MAX = 1 << 30  # a peer that sends a larger one is cut off
_QUEUE_MESSAGES = 4096  # above the window of cluster/delivery.py; what the socket drops is sent again


@dataclass(frozen=True)
class UnreadableMessage:
    """A frame that is no message, and why."""

    reason: str


class _Session:
    """One stream down."""

    def __init__(self, name: str) -> None:
        self.name, self.spool = name, Spool()
        self.sender = Sender(self.spool)


Arrived = list[tuple[str, AnyMessage | UnreadableMessage]]


class Hub:
    """Binds at construction and writes `run_dir/controller.json`."""

    def __init__(self, run_dir: Path, run_id: str, host: str, port: int, machine: str) -> None:
        self._context, self._run_dir = zmq.Context(), run_dir
        self._address, secret = new_address(run_id, host, machine)
        self._admission = Admission(self._context, self._address.client_public)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.LINGER, 2000)
        self._router.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES)
        self._router.setsockopt(zmq.RCVHWM, 0)  # as in cluster/dealer.py; the members' windows bound it
        self._router.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_SECONDS * 1000))
        self._router.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"laminar")
        self._router.curve_server = True
        self._router.curve_secretkey = secret.encode()
        try:
            self._router.bind(f"tcp://{socket.gethostbyname(host)}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(0)
            raise LaminarError(
                f"the controller cannot listen at {host}:{port} ({error}); set cluster.port=0 or "
                "cluster.host to an address of this machine"
            ) from None
        self._address.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        write_address(run_dir, self._address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._admission.socket, zmq.POLLIN)

        self._sessions: dict[str, _Session] = {}
        self._session_numbers = itertools.count(1)
        self._receivers: dict[str, Receiver] = {}
        self._received: dict[str, int] = {}  # by identity, what the committed store knows
        self._uncommitted: dict[str, int] = {}
        self._answers_due: dict[str, bool] = {}  # identity -> whether to ask for what is missing
        self._frames = self._bytes = 0  # taken so far
        # until then (monotonic seconds) everything that had come was taken; since when and frame the next
        # such moment is worked at
        self.heard_until, self._hearing = time.monotonic(), (time.monotonic(), 0)

    @property
    def address(self) -> ControllerAddress:
        return self._address

    def announce(self, store_id: str, received: Mapping[str, int]) -> None:
        """Says in controller.json which store is served, and takes up all streams where that store left them:
        the newest number `received` of each identity."""
        self._received.update(received)
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
        while self._frames - taken < limit and self._bytes - size < _BYTES_AT_ONCE:
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
            self.heard_until, self._hearing = now, (now, self._frames)
        elif self._frames - frame >= len(self._sessions) + len(self._receivers):
            self.heard_until, self._hearing = since, (now, self._frames)

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
                message = self._take(name, frames, now)
            except (DeliveryError, msgspec.DecodeError) as error:
                messages.append((name, UnreadableMessage(str(error))))
                continue
            if message is not None:
                messages.append((name, message))
            if self._bytes >= bytes_max:
                return

    def _take(self, name: str, frames: list[bytes], now: float) -> AnyMessage | None:
        if len(frames) != 2:
            raise DeliveryError(f"it has {len(frames)} parts, not a header and a message")
        header, payload = decode_header(frames[0]), frames[1]
        session = self._sessions.get(name)
        if session is not None and header.session == session.name:
            self._hear(name, session, header)
        if header.seq == 0:
            if session is not None and self._receiver(name).misses(header.sent, now):
                self._answers_due[name] = True
            if not payload:
                return None
            message = decode(payload)
            if not isinstance(message, Hello | Ping | StopRequest):
                raise DeliveryError(f"a {type(message).__name__} without a number")
            return message
        return decode(payload) if self._is_next(name, header.seq, now, session is not None) else None

    def _hear(self, name: str, session: _Session, header: Header) -> None:
        session.sender.acknowledged(header.ack)
        if header.again:
            session.sender.rewind()
        self._transmit(name, session)

    def _is_next(self, name: str, seq: int, now: float, member: bool) -> bool:
        """Whether a numbered message is to be taken."""
        if not member and seq <= self._received.get(name, 0):  # its Goodbye, most likely
            self._answers_due.setdefault(name, False)
            return False
        receiver = self._receiver(name)
        if not member:
            return False
        if receiver.take(seq):
            self._uncommitted[name] = seq
            return True
        self._answers_due[name] = self._answers_due.get(name, False) or receiver.misses(seq, now)
        return False

    def _receiver(self, name: str) -> Receiver:
        receiver = self._receivers.get(name)
        if receiver is None:
            receiver = self._receivers[name] = Receiver(self._received.get(name, 0))
        return receiver

    # ---- what is acknowledged ------------------------------------------------------------------------------

    def received(self) -> dict[str, int]:
        """By identity, the newest number that has arrived since the last `committed`: for the transaction
        that holds the effects."""
        return dict(self._uncommitted)

    def committed(self) -> None:
        """What has arrived is in the store for good: acknowledges it."""
        for name, seq in self._uncommitted.items():
            self._received[name] = seq
            self._answers_due.setdefault(name, False)
        self._uncommitted.clear()
        for name, again in self._answers_due.items():
            self._put(name, 0, b"", again)
        self._answers_due.clear()

    # ---- what goes -----------------------------------------------------------------------------------------

    def send(self, identity: str, message: Message) -> None:
        """Queues a message for a member, which it reaches once; for one that is no member it is sent once,
        and may be lost. A Welcome makes a member."""
        if isinstance(message, Welcome):
            self._begin(identity)
            message = msgspec.structs.replace(message, received=self._received.get(identity, 0))
        session = self._sessions.get(identity)
        if session is None or isinstance(message, Welcome | Rejoin | Pong):
            self._put(identity, 0, encode(message))
            return
        try:
            session.sender.push(encode(message))
        except (SpoolFull, OSError) as error:
            raise LaminarError(f"what waits for {identity} cannot be kept: {error}") from None
        self._transmit(identity, session)

    def end(self, identity: str) -> None:
        """It is no member any more. Called when all that was taken of it is committed."""
        self._receivers.pop(identity, None)
        session = self._sessions.pop(identity, None)
        if session is not None:
            session.spool.close()

    def _begin(self, identity: str) -> None:
        """A new session, but for a member that has one: it has said Hello twice, or has not had its
        Welcome."""
        if identity not in self._sessions:
            self._sessions[identity] = _Session(f"{self._address.run_id}#{next(self._session_numbers)}")

    def _transmit(self, identity: str, session: _Session) -> None:
        while (due := session.sender.peek()) is not None:
            number, frame = due
            session.sender.advance()
            self._put(identity, number, frame)

    def _put(self, identity: str, number: int, frame: bytes, again: bool = False) -> None:
        session = self._sessions.get(identity)
        name, sent = (session.name, session.sender.sent) if session else ("", 0)
        header = Header(name, number, sent, self._received.get(identity, 0), again)
        self._router.send_multipart([identity.encode(), encode_header(header), frame], zmq.NOBLOCK)

    def close(self) -> None:
        for identity in list(self._sessions):
            self.end(identity)
        self._router.close()
        self._admission.close()
        self._context.term()
