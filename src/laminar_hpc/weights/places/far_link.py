"""The receiving end of a link between places: pulls shipments from a gate, piece by piece, over several
connections at a time.

To whoever receives it is a Link: bytes come in order, as a relay before this one would send them. Behind that
a piece is asked for until it has come, whatever happens to connections meanwhile. So a cut costs the pieces
that were on their way, and changed bytes, which CURVE refuses by ending the connection, cost one of them.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

from laminar_hpc.line.dealer import connect_secured
from laminar_hpc.line.messages.gate import (
    AHEAD,
    HANDSHAKE_MILLISECONDS,
    OUTAGE_SECONDS,
    PIECE_BYTES,
    STREAMS,
    Fetch,
    FetchedPiece,
    Gone,
    Next,
    Nothing,
    decode_reply,
    encode,
    pieces_of,
)
from laminar_hpc.line.messages.places import GateAddress
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import LinkBroken

MEET_SECONDS = 20.0  # for a gate's first answer
_AGAIN_SECONDS = 0.5  # from the end of a connection to the next one in its place
_POLL_SECONDS = 0.05
_HEARTBEAT_SECONDS = 2.0
_SILENT_SECONDS = 10.0  # a connection that carries nothing for so long is made anew
_WINDOW = 4 * AHEAD * STREAMS  # pieces from the first that is missing to the last that is asked for
_LATE = STREAMS // 4  # the last so many pieces are asked for once more, where a connection has nothing to do


class _Awaited(dist.Work):
    """A tensor that is to be filled."""

    def __init__(self, link: "FarLink", tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self._link = link

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._link.fill_until(self)
        return True


class _Connection:
    """One of STREAMS; `asked`: the questions whose answers are due over it."""

    def __init__(self, context: zmq.Context, address: GateAddress) -> None:
        self.asked: list[Next | Fetch] = []
        self.is_up = False
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + 1024)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, int(_HEARTBEAT_SECONDS * 1000))
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_SILENT_SECONDS * 1000))
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, int(_SILENT_SECONDS * 1000))
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor = self.socket.get_monitor_socket(events)
        connect_secured(self.socket, address)

    def has_ended(self) -> bool:
        """Looks at what the monitor says."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                return True
            self.is_up = True
        return False

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close(0)


class FarLink(Link):
    """For the thread that makes it; `close` is for any. `held()`: the weight id that is here whole.

    Operations last until what they wait for is there. They raise LinkBroken after MEET_SECONDS without any
    answer, later after OUTAGE_SECONDS without one, and when the gate has given up what was on its way."""

    def __init__(
        self, address: GateAddress, epoch: int, peer: str, place: str, held: Callable[[], int | None]
    ) -> None:
        self.epoch = epoch
        self.peer = peer
        self.device = torch.device("cpu")
        self.seconds = OUTAGE_SECONDS
        self._address = address
        self._place = place
        self._held = held
        self._posted = deque[_Awaited]()
        self._writing = threading.Lock()  # guards `closed` and the tensors that are filled
        self._owner = threading.get_ident()
        self._context = zmq.Context(io_threads=2)
        self._poller = zmq.Poller()
        self._connections = {self._connect() for _ in range(STREAMS)}
        self._due: list[float] = []  # when connections are made in place of those that have ended
        self._began = time.monotonic()
        self._heard: float | None = None  # when the newest answer came
        self._shipment = 0  # that comes, or that has come last
        self._pieces: int | None = None  # that it has; None: the next one is waited for
        self._todo: list[int] = []  # a heap: pieces to be asked for again, before those from `_asked` on
        self._late: set[int] = set()  # those that were asked for twice, as they took so long
        self._asked = self._taken = 0  # pieces that were asked for once, and that were handed out
        self._ready: dict[int, memoryview] = {}
        self._rest = memoryview(b"")  # of the piece that is handed out

    def _start(self, sends: bool, tensor: torch.Tensor) -> dist.Work:
        assert not sends, "nothing is sent to a gate"
        self._posted.append(_Awaited(self, tensor))
        return self._posted[-1]

    def close(self) -> None:
        """Nothing is written to any tensor when this returns; whoever waits leaves within _POLL_SECONDS."""
        with self._writing:
            self.closed = True
        if threading.get_ident() == self._owner:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._context.destroy(0)

    def fill_until(self, awaited: _Awaited) -> None:
        """Fills what was posted, in order, up to this."""
        while awaited in self._posted:
            target = self._posted[0].tensor.view(torch.uint8).view(-1).numpy().data
            while target:
                if not self._rest:
                    self._rest = self._next_piece()
                with self._writing:
                    if self.closed:
                        raise LinkBroken(f"the link to {self.peer} was closed")
                    size = min(len(target), len(self._rest))
                    target[:size] = self._rest[:size]
                target, self._rest = target[size:], self._rest[size:]
            self._posted.popleft()

    # ---- pieces --------------------------------------------------------------------------------------------

    def _next_piece(self) -> memoryview:
        """The one that follows, of the next shipment after the last one of this."""
        while self._taken not in self._ready:
            self._ask()
            self._hear()
        piece = self._ready.pop(self._taken)
        self._taken += 1
        if self._taken == self._pieces:
            self._pieces = None
            self._asked = self._taken = 0
            self._todo.clear()
            self._late.clear()
        return piece

    def _ask(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
            self._connections.add(self._connect())
        for ahead in range(AHEAD):  # a second one where all connections that are up have one
            for connection in self._connections:
                if not connection.is_up or len(connection.asked) > ahead:
                    continue
                number = self._choose(idle=ahead == 0)
                if number is None:
                    return
                waits = self._pieces is None
                what = Next(self._place, self._held(), number) if waits else Fetch(self._shipment, number)
                connection.asked.append(what)
                connection.socket.send(encode(what))

    def _choose(self, idle: bool) -> int | None:
        """What is asked for next, over a connection that has nothing else to do if it is `idle`."""
        pieces = STREAMS * AHEAD if self._pieces is None else self._pieces
        while self._todo:
            if self._is_missing(number := heapq.heappop(self._todo)) and number < pieces:
                return number
        if self._asked < min(pieces, self._taken + _WINDOW):
            self._asked += 1
            return self._asked - 1
        missing = min(self._asked, pieces) - self._taken - len(self._ready)
        if idle and self._pieces is not None and missing <= _LATE:
            for number in range(self._taken, min(self._asked, pieces)):
                if self._is_missing(number) and number not in self._late:
                    self._late.add(number)
                    return number
        return None

    def _is_missing(self, number: int) -> bool:
        return number >= self._taken and number not in self._ready

    def _hear(self) -> None:
        """Takes what has come, if it does within _POLL_SECONDS."""
        if self.closed:
            raise LinkBroken(f"the link to {self.peer} was closed")
        ready = dict(self._poller.poll(int(_POLL_SECONDS * 1000)))
        for connection in list(self._connections):
            if connection.socket in ready:
                self._take(connection)
            if connection.monitor in ready and connection.has_ended():
                self._lose(connection)
        silent = time.monotonic() - (self._heard or self._began)
        if silent > (OUTAGE_SECONDS if self._heard else MEET_SECONDS):
            raise LinkBroken(
                f"no answer from the gate of {self.peer} at {self._address.host}:{self._address.port} "
                f"for {silent:.0f} s: let this machine connect to it, or set relay.gate where the trainer is"
            )

    def _take(self, connection: _Connection) -> None:
        while True:
            try:
                reply, content = connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard = time.monotonic()
            try:
                answer = decode_reply(reply.buffer)
            except msgspec.DecodeError as error:
                raise LinkBroken(f"{self.peer} runs another version of laminar_hpc ({error})") from None
            match answer:
                case Gone(shipment, number):
                    self._answered(connection, number)
                    if self._pieces is not None and shipment == self._shipment:
                        raise LinkBroken(f"{self.peer} has given up what was on its way")
                case Nothing(number):
                    self._answered(connection, number)
                    heapq.heappush(self._todo, number)
                case FetchedPiece(shipment, number, size):
                    self._answered(connection, number)
                    if self._pieces is None and shipment > self._shipment:
                        self._shipment = shipment
                        self._pieces = pieces_of(size)
                        self.wire_bytes = size
                    comes = self._pieces is not None and shipment == self._shipment
                    if comes and self._is_missing(number) and len(content):
                        self._ready[number] = content.buffer

    @staticmethod
    def _answered(connection: _Connection, piece: int) -> None:
        """The oldest question for it over that connection."""
        asked = next(each for each in connection.asked if each.piece == piece)
        connection.asked.remove(asked)

    # ---- connections ---------------------------------------------------------------------------------------

    def _connect(self) -> _Connection:
        connection = _Connection(self._context, self._address)
        self._poller.register(connection.socket, zmq.POLLIN)
        self._poller.register(connection.monitor, zmq.POLLIN)
        return connection

    def _lose(self, connection: _Connection) -> None:
        """What was asked for over it is asked for again."""
        for asked in connection.asked:
            if isinstance(asked, Next) or (self._pieces and asked.shipment == self._shipment):
                heapq.heappush(self._todo, asked.piece)
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.monitor)
        self._connections.remove(connection)
        connection.close()
        heapq.heappush(self._due, time.monotonic() + _AGAIN_SECONDS)
