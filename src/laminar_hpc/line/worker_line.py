"""A worker's line to the controller: one encrypted socket and the I/O thread that drives it.

    queue -> spool -> stream up -> socket;   socket -> stream down -> `deliver`

The thread never waits in a send, pings once a second and notices a silent controller, so a role may compute
for minutes without being taken for dead. line/delivery.py makes every message arrive once, over broken
connections and a new controller. A worker that may outlive its controller says Hello to the next one, which
line/controller_watch.py finds, under the same identity.
"""

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line import unsaid
from laminar_hpc.line.address import ControllerAddress, read_address
from laminar_hpc.line.controller_watch import ControllerWatch
from laminar_hpc.line.dealer import PING_SECONDS, connect
from laminar_hpc.line.delivery import DeliveryError, Header, Receiver, Sender, decode_header, encode_header
from laminar_hpc.line.endings import MessageRefused, StopReceived, TrainersReplaced
from laminar_hpc.line.messages.data import Message, ReplicaLoad
from laminar_hpc.line.messages.membership import (
    Failure,
    Hello,
    Ping,
    Pong,
    Rejoin,
    Stop,
    TrainerProgress,
    TrainersEnded,
    Welcome,
)
from laminar_hpc.line.messages.wire import AnyMessage, decode, encode
from laminar_hpc.line.parcel import next_parcel, unpack
from laminar_hpc.line.spool import Spool, SpoolFull

log = logging.getLogger(__name__)
_HELLO_SECONDS = 2.0  # between two Hellos, until Welcome
_FLUSH_SECONDS = 5.0  # for the last messages to be acknowledged
_STUCK_SECONDS = 0.02  # until the socket is asked again whether it has room
_TURN_MESSAGES = 1000
# over a long line an empty frame so often, for so long, behind what is not acknowledged: TCP hears of a lost
# packet by those behind it, and else waits for a timeout that doubles
_PROBE_SECONDS, _PROBED_SECONDS = 0.1, 2.0


class WorkerLine:
    """`put` may be called from any thread; `deliver` is called in the I/O thread."""

    def __init__(
        self,
        run_dir: Path,
        hello: Hello,
        heartbeat_seconds: float,
        patience_seconds: float,
        launch: str,
        deliver: Callable[[Message | Exception], None],
    ) -> None:
        self._run_dir = run_dir
        self._hello = hello
        self._launch = launch
        self._deliver = deliver
        self.watch = ControllerWatch(run_dir, hello, heartbeat_seconds, patience_seconds)
        self._identity = hello.identity.encode()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)  # never while somebody may still call `put`
        self._poller.register(self._wake, zmq.POLLIN)
        self.queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._puts = 0
        self._counting = threading.Lock()
        self.load: ReplicaLoad | None = None  # goes out with every ping
        self.progress: TrainerProgress | None = None  # the same
        self._spool = Spool()
        self._sender = Sender(self._spool)
        self._receiver = Receiver()
        self._session = ""
        self._joining = False  # from a Rejoin or a new controller to its Welcome
        self._said_hello = self._pinged = 0.0
        self._transmitted = self._probed = 0.0  # when something numbered was sent last, and anything
        self._answer_due = self._again_due = self._ended = self._stuck = False
        self.leaves_unsaid = self._is_left = False  # at its end, for the next controller
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    # ---- for the channel -----------------------------------------------------------------------------------

    @property
    def spooling(self) -> bool:
        """So much waits that frames go to the disk."""
        return self._spool.on_disk

    @property
    def has_said_all(self) -> bool:
        """All that was put is on record, or left for the next controller."""
        return self._is_left or self._sender.acked >= self._puts

    @property
    def idle(self) -> bool:
        """All that was put was acknowledged, or the line has ended."""
        return self._ended or self._sender.acked >= self._puts

    def put(self, frame: bytes) -> None:
        """Queues a message; never waits."""
        with self._counting:
            self._puts += 1
        self.queue.put(frame)
        os.eventfd_write(self._wake, 1)

    def ping(self) -> None:
        """Tells the load at once."""
        self._pinged = 0.0
        os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread once all was acknowledged, the controller has gone, or after _FLUSH_SECONDS; of a
        role that was told to end, when its time is over."""
        now = time.monotonic()
        self._close_by = now + _FLUSH_SECONDS
        os.eventfd_write(self._wake, 1)
        self._thread.join(max(self._close_by, self.watch.ends_at or now) - now + _FLUSH_SECONDS)
        self.watch.close()
        self._context.term()
        self._spool.close()

    def join(self, seconds: float) -> Welcome:
        """Says Hello until Welcome comes. The address is read anew each time, because an earlier launch may
        have left an old one. After an error the line is of no more use."""
        try:
            return self._join(seconds)
        except BaseException:
            self._context.destroy(0)  # a collector that finds it open could wait for its sockets for good
            raise

    def _join(self, seconds: float) -> Welcome:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            address = read_address(self._run_dir)
            if address is None or self._launch not in ("", address.launch):
                time.sleep(0.05)
                continue
            self._connect(address)
            self._send(0, encode(self._hello))
            patience = time.monotonic() + 5
            while time.monotonic() < min(patience, deadline):
                if self._dealer.poll(200):
                    if (welcome := self._first_answer()) is not None:
                        return welcome
                elif (now := read_address(self._run_dir)) is None or now.run_id != address.run_id:
                    break
            self._dealer.close(0)
        raise LaminarError(
            f"{self._hello.name} waited {seconds:.0f} s for the controller of "
            f"{self._run_dir} and got no answer; "
            "is the controller rank running, and can this machine reach cluster.host?"
        )

    def _first_answer(self) -> Welcome | None:
        try:
            header, (answer, *_) = _read(self._dealer.recv_multipart())
        except (DeliveryError, msgspec.DecodeError) as error:
            raise MessageRefused(error) from None
        if isinstance(answer, Welcome):
            self._welcomed(header.session, answer)
            self._poller.register(self._dealer, zmq.POLLIN)
            return answer
        if isinstance(answer, Failure):
            raise LaminarError(answer.text)
        if isinstance(answer, TrainersEnded):
            raise TrainersReplaced(answer.reason)
        if isinstance(answer, Stop):
            raise StopReceived(answer.reason)
        return None

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._turn()
            except Exception as error:  # a role that is not told of it would wait for ever
                self._end(LaminarError(f"its line to the controller has failed: {error!r}"))
        if self.leaves_unsaid and not self._sender.idle:
            self._leave_unsaid()
        self._dealer.close(0 if self._sender.idle or self._ended or self.watch.detached else None)

    def _leave_unsaid(self) -> None:
        identity, first = self._identity.decode(), self._sender.acked + 1
        head = unsaid.Head(identity, self._hello.index, self.watch.store_id, first)
        try:
            path = unsaid.leave(self._run_dir, head, self._sender.unacknowledged())
            self._is_left = True
            log.info("what no controller has taken is left in %s", path)
        except OSError as error:
            log.error("what no controller has taken is lost: %s", error)

    def _is_over(self) -> bool:
        """Closing, and nothing is left to be done."""
        if self._close_by is None:
            return False
        now, ends_at = time.monotonic(), self.watch.ends_at
        if self._ended or (self.queue.empty() and self._sender.idle):
            return True
        may_come = ends_at is not None and now < ends_at
        return not may_come and (now > self._close_by or self.watch.detached or self.watch.has_left())

    def _turn(self) -> None:
        wait = PING_SECONDS if self._close_by is None and not self._probes(time.monotonic()) else 0.1
        self._poller.poll(int(1000 * (_STUCK_SECONDS if self._stuck else wait)))
        now = time.monotonic()
        self._read_queue()
        self._read_socket(now)
        if now - self._pinged >= PING_SECONDS:
            self._pinged = now
            self._send(0, encode(Ping(self.load, self.progress)))
        if self._joining and now - self._said_hello >= _HELLO_SECONDS:
            self._said_hello = now
            self._send(0, encode(self._hello))
        if not self._ended:
            self._watch_controller(now)
        self._transmit()
        if self._probes(now) and now - self._probed >= _PROBE_SECONDS:
            self._send(0, b"")

    def _probes(self, now: float) -> bool:
        recent = now - self._transmitted < _PROBED_SECONDS
        return recent and bool(self._hello.place) and not (self._joining or self._sender.idle)

    def _read_queue(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        try:
            while not self.queue.empty():
                self._sender.push(self.queue.get())
        except (SpoolFull, OSError) as error:
            self._end(error if isinstance(error, SpoolFull) else LaminarError(f"the spool failed: {error}"))

    def _read_socket(self, now: float) -> None:
        for _ in range(_TURN_MESSAGES):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.watch.heard(now, self._joining)
            try:
                header = decode_header(frames[0])
                new = self._new(header, now)
                if new and (len(frames) != 2 or frames[1]):
                    for message in _read(frames)[1][-new:]:
                        self._take(header, message)
            except (DeliveryError, msgspec.DecodeError) as error:
                self._end(MessageRefused(error))

    def _new(self, header: Header, now: float) -> int:
        """How many of the messages that come with this header are to be taken, the last ones."""
        self._sender.acknowledged(header.ack)
        if header.again:
            self._sender.rewind()
        here = header.session == self._session
        if header.seq == 0:
            self._again_due |= here and self._receiver.misses(header.sent, now)
            if header.session and not here and not self._joining:  # its Welcome was lost
                self._joining = True
                self._said_hello = 0.0
            return 1
        if not here:
            return 0
        self._answer_due = True
        if new := self._receiver.take(header.seq, header.messages):
            return new
        self._again_due |= self._receiver.misses(header.seq, now)
        return 0

    def _take(self, header: Header, message: AnyMessage) -> None:
        if isinstance(message, Stop):
            self._deliver(StopReceived(message.reason))
        elif isinstance(message, Failure):
            self._deliver(LaminarError(message.text))
        elif isinstance(message, TrainersEnded):
            self._deliver(TrainersReplaced(message.reason))
        elif isinstance(message, Rejoin):
            if not self._joining:
                log.warning("the controller had taken this %s for dead; joining again", self._hello.role)
                self._joining = True
                self._said_hello = 0.0
        elif isinstance(message, Welcome):
            if header.session != self._session:  # else the answer to a second Hello of the same joining
                self._welcomed(header.session, message)
                self._deliver(message)
            self._joining = False
        elif not isinstance(message, Pong):
            self._deliver(message)

    def _welcomed(self, session: str, welcome: Welcome) -> None:
        """Goes on behind what the controller's store has received. Raises DeliveryError when that store is
        older than what it has acknowledged."""
        self._sender.resume(welcome.received)
        self._session = session
        self._receiver = Receiver()
        self._joining = False
        self._hello = self._hello.welcomed(welcome.index)
        self.watch.welcomed(self._hello, welcome.store_id)

    def _transmit(self) -> None:
        """As much as the window and the socket take; what is received is acknowledged with it."""
        self._stuck = False
        packs = bool(self._hello.place)
        while not self._joining and not self._stuck and (due := next_parcel(self._sender, packs)) is not None:
            if self._send(due.last, due.payload, packed=due.packed):
                self._sender.advance(due.last)
            else:
                self._stuck = True
        if self._again_due or self._answer_due:
            self._send(0, b"", self._again_due)

    def _send(self, number: int, frame: bytes, again: bool = False, packed: int = 0) -> bool:
        """Whether the socket has taken it."""
        sent = max(number, self._sender.sent)
        header = encode_header(Header(self._session, number, sent, self._receiver.received, again, packed))
        try:
            self._dealer.send(header, zmq.NOBLOCK | zmq.SNDMORE)
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._answer_due = False
        self._again_due = self._again_due and not again
        self._probed = time.monotonic()
        self._transmitted = self._probed if number else self._transmitted
        return True

    def _watch_controller(self, now: float) -> None:
        found = self.watch.look(now)
        if isinstance(found, Exception):
            self._end(found)
        elif found is not None:
            self._connect_anew(found)
            self._joining = True
            self._said_hello = 0.0
        elif (same := self.watch.gives_up(now)) is not None:
            self._connect_anew(same)

    def _connect_anew(self, address: ControllerAddress) -> None:
        self._poller.unregister(self._dealer)
        self._dealer.close(0)
        self._connect(address)
        self._poller.register(self._dealer, zmq.POLLIN)

    def _connect(self, address: ControllerAddress) -> None:
        self._dealer = connect(self._context, self._identity, address)
        self.watch.begin(address)

    def _end(self, error: Exception) -> None:
        """The role meets `error`; the controller is watched no more."""
        if not self._ended:
            self._ended = True
            self._deliver(error)


def _read(frames: list[bytes]) -> tuple[Header, list[AnyMessage]]:
    """Raises DeliveryError or msgspec.DecodeError on what is no header with messages."""
    if len(frames) != 2:
        raise DeliveryError(f"it has {len(frames)} parts, not a header and a message")
    header = decode_header(frames[0])
    return header, [decode(frame) for frame in unpack(header, frames[1])]
