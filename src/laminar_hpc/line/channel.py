"""A worker's channel to the controller, as its role sees it: an inbox, and sends that never wait.

line/worker_line.py has the socket and its thread.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.endings import (
    StopReceived,
    TrainersReplaced,
)
from laminar_hpc.line.in_order import InOrder
from laminar_hpc.line.messages.data import Message, ReplicaLoad
from laminar_hpc.line.messages.membership import Failure, Goodbye, Hello, Ping, TrainerProgress, Welcome
from laminar_hpc.line.messages.rollouts import Increment
from laminar_hpc.line.messages.wire import encode
from laminar_hpc.line.worker_line import WorkerLine

_LOOK_SECONDS = 0.2  # between two looks whether a controller is there
_FLUSH_SECONDS = 0.05  # between two looks whether all has arrived
_WRITE_SECONDS = 2.0  # for writes under way when the channel closes
T = TypeVar("T")


class Channel:
    """Thread-safe. Use either receive/request (inbox) or subscribe (callback), not both.

    A Welcome among the messages says that the role has joined anew: the controller had taken it for dead, or
    another controller (then `run_id` differs) has come over the same store. What the role has sent arrives
    once all the same; what the controller had sent to it and the role had not received is gone."""

    def __init__(
        self,
        run_dir: Path,
        hello: Hello,
        join_seconds: float,
        heartbeat_seconds: float,
        patience_seconds: float = 0.0,
        launch: str = "",
    ) -> None:
        """`patience_seconds`: how long it outlives its controller and looks for the next one; 0: it ends
        with it. `launch`: joins the controller of this start only (see `launch_id`); "" joins any."""
        self._hello = hello
        self._inbox: list[Message | Exception] = []
        self._arrived = threading.Condition()
        self._callback: Callable[[Message | Exception], None] | None = None
        self._closing = False
        self.sessions = 0  # Welcomes after the first: a question that is open then must be asked again
        # called in the I/O thread when this rank's trainer generation has ended: its main thread may be stuck
        self.when_replaced: Callable[[TrainersReplaced], None] | None = None
        # called by a thread beside the main one, which may wait for what never comes, with its error
        self.when_failed: Callable[[BaseException], None] = lambda _: None
        self._line = WorkerLine(run_dir, hello, heartbeat_seconds, patience_seconds, launch, self._deliver)
        self._order = InOrder(self._line.put, self._deliver)
        self.welcome = self._line.join(join_seconds)
        self._hello = hello.numbered(self.welcome.index)
        self._line.start()

    @property
    def index(self) -> int:
        """The number of this worker within its role."""
        return self._hello.index

    @property
    def load(self) -> ReplicaLoad | None:
        """Goes out with every ping."""
        return self._line.load

    @load.setter
    def load(self, load: ReplicaLoad | None) -> None:
        self._line.load = load

    def tell_progress(self, progress: TrainerProgress) -> None:
        """Goes out with every ping."""
        self._line.progress = progress

    def _deliver(self, item: Message | Exception) -> None:
        if isinstance(item, TrainersReplaced) and self.when_replaced is not None:
            self.when_replaced(item)
        with self._arrived:
            if isinstance(item, Welcome):
                self.sessions += 1
            if self._callback is not None:
                self._callback(item)
            else:
                self._inbox.append(item)
                self._arrived.notify_all()

    # ---- for the role --------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queues a message; returns at once. It arrives once and in order, if a controller comes in time."""
        if isinstance(message, Ping):
            self._line.ping()
        elif not (isinstance(message, Increment) and self._line.spooling):  # the response's end has it all
            put = self._line.put if isinstance(message, Failure) else self._order.add
            put(encode(message))

    def send_after(self, write: "Future[T]", message: Callable[[T], Message]) -> None:
        """Sends `message(what the write gives)` once it is done, and behind it what is sent meanwhile. A
        write that fails ends the role: of that nothing is sent but a Failure."""
        self._order.add_after(write, lambda given: encode(message(given)))

    def interrupt(self, error: Exception) -> None:
        """Raises `error` in whoever waits for a message, now or next."""
        self._deliver(error)

    def end_within(self, seconds: float, leaves_unsaid: bool = False) -> None:
        """This process was told to end: for how long it waits for another controller, if there is none.
        `leaves_unsaid`: what none has taken by then is left in the run directory for the next."""
        self._line.watch.end_within(seconds)
        self._line.leaves_unsaid = leaves_unsaid and self._line.watch.patience > 0

    @property
    def detached(self) -> bool:
        """There is no controller now; another one may come."""
        return self._line.watch.detached

    def pending(self, *wanted: type) -> bool:
        """Whether a message of these types, or an exception, is there."""
        with self._arrived:
            return any(isinstance(item, (*wanted, Exception)) for item in self._inbox)

    def wait(self, *wanted: type, timeout: float, session: int | None = None) -> Message | None:
        """The next message of these types if one comes within `timeout` seconds, and before the session of
        this number is over; messages of other types stay queued."""
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
                if left <= 0 or session not in (None, self.sessions):
                    return None
                self._arrived.wait(left)

    def _nothing_came(self, timeout: float, what: str) -> LaminarError:
        return LaminarError(
            f"{self._hello.name} waited {timeout:.0f} s for {what} from the controller and gave up"
        )

    def receive(self, timeout: float, what: str) -> Message:
        """The next message. Raises LaminarError after `timeout` seconds, ControllerLost, or StopReceived."""
        if (message := self.wait(Message, timeout=timeout)) is None:
            raise self._nothing_came(timeout, what)
        return message

    def request(
        self,
        message: Message,
        *answers: type,
        timeout: float,
        what: str,
        fits: Callable[[Message], bool] = lambda _: True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Message:
        """Sends, then waits for one of the types `answers` that `fits`; others of these types are forgotten,
        messages of other types stay queued. After a Welcome it asks again. `meanwhile` is called every
        0.2 s, and what it raises ends the wait. Raises as `receive`; time without a controller does not
        count."""
        deadline, session = time.monotonic() + timeout, self.sessions
        self.send(message)
        while (left := deadline - time.monotonic()) > 0:
            found = self.wait(*answers, timeout=min(left, _LOOK_SECONDS), session=session)
            if found is not None and fits(found):
                return found
            if session != self.sessions:
                session = self.sessions
                self.send(message)
            if self.detached:
                deadline = time.monotonic() + timeout
            meanwhile()
        raise self._nothing_came(timeout, what)

    def flush(self) -> None:
        """Until the controller has acknowledged all that was sent, or says Stop. Raises ControllerLost when
        there is none for too long, or what else came in place of a message."""
        with contextlib.suppress(StopReceived):
            while not (self._order.idle and self._line.idle):
                self.wait(timeout=_FLUSH_SECONDS)

    def subscribe(self, callback: Callable[[Message | Exception], None]) -> None:
        """Every message, ControllerLost or StopReceived goes to `callback` from now on, in the I/O thread."""
        with self._arrived:
            self._callback = callback
            for item in self._inbox:
                callback(item)
            self._inbox.clear()

    @property
    def has_said_all(self) -> bool:
        """It was closed, and what was sent is on record, or left in run_dir for the next controller."""
        return self._closing and self._order.idle and self._line.has_said_all

    def close(self, goodbye: bool = True) -> None:
        """Says Goodbye, waits some seconds for what is queued to be acknowledged, and ends the thread."""
        if self._closing:
            return
        self._closing = True
        with self._arrived:
            self._callback = None  # the role has ended
        self._order.drain(_WRITE_SECONDS)
        if goodbye:
            self._line.put(encode(Goodbye()))
        self._line.close()
