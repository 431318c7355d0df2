"""A worker's line to the controller: one encrypted DEALER socket, driven by an I/O thread of its own.

The thread sends what is queued, hands every message to the inbox (or to a subscriber), pings once a second
and notices a silent controller. So a role may compute for minutes without being taken for dead, and never
waits without bound. A worker that may come and go (`patience_seconds`) outlives a cut network, and says Hello
again when the controller has given it up meanwhile.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.cluster import terminal
from laminar_hpc.cluster.address import ControllerAddress, read_address
from laminar_hpc.cluster.processes import process_is_alive
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.messages.data import Message, ReplicaLoad
from laminar_hpc.messages.membership import Failure, Goodbye, Hello, Ping, Pong, Rejoin, Stop, Welcome
from laminar_hpc.messages.wire import decode, encode

log = logging.getLogger(__name__)
_PING_SECONDS = 1.0
_ASLEEP_SECONDS = 5.0  # a turn of the thread that took so long: this process stood still, not the controller
RUN_FAILED = "the run has failed"  # reason of a Stop
SAME_VERSION = "install the same version of laminar_hpc on all machines"
_RECONNECT_SECONDS = 3.0  # a connection that carries nothing for so long is made anew


class ControllerLost(LaminarError):
    """The controller has said nothing for too long."""


class MessageRefused(LaminarError):
    """The controller has sent what this worker cannot read, so the two no longer agree on what happens."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"a message from the controller was refused: {error}; {SAME_VERSION}")


class StopReceived(Exception):
    """The controller asks this worker to leave; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Channel:
    """Thread-safe. Use either receive/request (inbox) or subscribe (callback), not both."""

    def __init__(
        self,
        run_dir: Path,
        hello: Hello,
        join_seconds: float,
        heartbeat_seconds: float,
        patience_seconds: float = 0.0,
        launch: str = "",
    ) -> None:
        """`launch`: joins the controller of this torchrun only (see `launch_id`); "" joins any."""
        self._run_dir, self._hello, self._heartbeat, self._patience = (
            run_dir,
            hello,
            heartbeat_seconds,
            patience_seconds,
        )
        self._launch = launch
        self._identity = f"{hello.role}:{hello.index}:{hello.incarnation}".encode()
        self._context = zmq.Context()
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._wake_send, wake_receive = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        wake_receive.bind("inproc://wake")
        self._wake_send.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self._inbox: list[Message | Exception] = []
        self._arrived = threading.Condition()
        self._callback: Callable[[Message | Exception], None] | None = None
        self._closing = False
        self.load: ReplicaLoad | None = None  # goes out with every ping
        self._rejoining = False
        self._address: ControllerAddress | None = None
        self._neighbour: int | None = None  # the controller's pid, if it is on this machine
        self._dealer, self.welcome = self._join(join_seconds)
        self._thread = threading.Thread(target=self._run, args=(wake_receive,), name="channel", daemon=True)
        self._thread.start()

    # ---- joining -------------------------------------------------------------------------------------------

    def _join(self, seconds: float) -> tuple[zmq.Socket, Welcome]:
        """Says Hello until Welcome comes. The address is read anew each time, because an earlier launch may
        have left an old one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            address = read_address(self._run_dir)
            if address is None or self._launch not in ("", address.launch):
                time.sleep(0.05)
                continue
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, self._identity)
            dealer.setsockopt(zmq.LINGER, 2000)
            dealer.setsockopt(zmq.HEARTBEAT_IVL, int(_PING_SECONDS * 1000))
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_RECONNECT_SECONDS * 1000))
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(_RECONNECT_SECONDS * 1000))
            dealer.curve_serverkey = address.server_public.encode()
            dealer.curve_publickey, dealer.curve_secretkey = (
                address.client_public.encode(),
                address.client_secret.encode(),
            )
            dealer.connect(f"tcp://{address.host}:{address.port}")
            dealer.send(encode(self._hello))
            patience = time.monotonic() + 5
            while time.monotonic() < min(patience, deadline):
                if dealer.poll(200):
                    try:
                        answer = decode(dealer.recv())
                    except msgspec.DecodeError as error:
                        raise MessageRefused(error) from None
                    if isinstance(answer, Welcome):
                        self._address = address
                        self._neighbour = address.pid if address.machine == self._hello.machine else None
                        return dealer, answer
                    if isinstance(answer, Failure):
                        raise LaminarError(answer.text)
                    if isinstance(answer, Stop):
                        dealer.close(0)
                        raise StopReceived(answer.reason)
                elif read_address(self._run_dir) != address:
                    break
            dealer.close(0)
        raise LaminarError(
            f"{self._hello.role} {self._hello.index} waited {seconds:.0f} s for the controller of "
            f"{self._run_dir} and got no answer; "
            "is the controller rank running, and can this machine reach cluster.host?"
        )

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def _run(self, wake: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        heard = pinged = turned = time.monotonic()
        lost = False
        while True:
            events = dict(poller.poll(int(_PING_SECONDS * 1000)))
            now = time.monotonic()
            if now - turned > _ASLEEP_SECONDS:
                heard = now
            turned = now
            if wake in events:
                wake.recv()
                while not self._outgoing.empty():
                    self._dealer.send(self._outgoing.get())
                if self._closing:
                    break
            while self._dealer.poll(0):
                heard = now
                self._take(self._dealer.recv())
            if now - pinged >= _PING_SECONDS:
                pinged = now
                self._dealer.send(encode(Ping(self.load)))
            if not lost and (how := self._controller_gone(now - heard)):
                lost = True
                if (
                    terminal.shared()
                    and self._neighbour is not None
                    and not process_is_alive(self._neighbour)
                ):
                    self._deliver(StopReceived(RUN_FAILED))  # who started the controller says how it died
                    continue
                self._deliver(
                    ControllerLost(
                        f"the controller {how}; see {self._run_dir / 'logs' / 'controller0.log'}, "
                        "then go on with the same command and resume=auto"
                    )
                )
        self._dealer.close()
        wake.close(0)

    def _controller_gone(self, silent: float) -> str:
        """What is wrong with the controller, or ""."""
        if self._neighbour is not None and not process_is_alive(self._neighbour):
            return f"(pid {self._neighbour}) has died"
        if silent <= self._heartbeat:
            return ""
        if silent > self._patience:
            return f"has been silent for {max(self._heartbeat, self._patience):.0f} s"
        return "" if read_address(self._run_dir) == self._address else "has left"

    def _take(self, frame: bytes) -> None:
        try:
            message = decode(frame)
        except msgspec.DecodeError as error:
            self._deliver(MessageRefused(error))
            return
        if isinstance(message, Stop):
            self._deliver(StopReceived(message.reason))
        elif isinstance(message, Failure):
            self._deliver(LaminarError(message.text))
        elif isinstance(message, Rejoin):
            log.warning("the controller had taken this %s for dead; joining again", self._hello.role)
            self._rejoining = True
            self._dealer.send(encode(self._hello))
        elif isinstance(message, Welcome):
            if self._rejoining:  # else the answer to a second Hello of the first joining
                self._rejoining = False
                self._deliver(message)
        elif not isinstance(message, Pong):
            self._deliver(message)

    def _deliver(self, item: Message | Exception) -> None:
        with self._arrived:
            if self._callback is not None:
                self._callback(item)
            else:
                self._inbox.append(item)
                self._arrived.notify_all()

    # ---- for the role --------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queues a message; returns at once."""
        self._outgoing.put(encode(message))
        with self._wake_lock:
            self._wake_send.send(b"")

    def interrupt(self, error: Exception) -> None:
        """Raises `error` in whoever waits for a message, now or next."""
        self._deliver(error)

    def pending(self, *wanted: type) -> bool:
        """Whether a message of these types, or an exception, is there."""
        with self._arrived:
            return any(isinstance(item, (*wanted, Exception)) for item in self._inbox)

    def wait(self, *wanted: type, timeout: float) -> Message | None:
        """The next message of these types if one comes within `timeout` seconds; messages of other types stay
        queued."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while True:
                for position, item in enumerate(self._inbox):
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, wanted):
                        del self._inbox[position]
                        return item
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._arrived.wait(left)

    def _next(self, wanted: tuple[type, ...], timeout: float, what: str) -> Message:
        message = self.wait(*wanted, timeout=timeout)
        if message is None:
            raise LaminarError(
                f"{self._hello.role} {self._hello.index} waited "
                f"{timeout:.0f} s for {what} from the controller and gave up"
            )
        return message

    def receive(self, timeout: float, what: str) -> Message:
        """The next message. Raises LaminarError after `timeout` seconds, ControllerLost, or StopReceived."""
        return self._next((Message,), timeout, what)

    def request(self, message: Message, *answers: type, timeout: float, what: str) -> Message:
        """Sends, then waits for one of the types `answers`; messages of other types stay queued."""
        self.send(message)
        return self._next(answers, timeout, what)

    def subscribe(self, callback: Callable[[Message | Exception], None]) -> None:
        """From now on every message, and a ControllerLost or StopReceived instance, goes to `callback`, in
        the I/O thread."""
        with self._arrived:
            self._callback = callback
            for item in self._inbox:
                callback(item)
            self._inbox.clear()

    def close(self, goodbye: bool = True) -> None:
        """Says Goodbye, flushes what is queued and ends the thread."""
        if self._closing:
            return
        if goodbye:
            self._outgoing.put(encode(Goodbye()))
        self._closing = True
        with self._wake_lock:
            self._wake_send.send(b"")
        self._thread.join(5)
        self._wake_send.close(0)
        self._context.term()
