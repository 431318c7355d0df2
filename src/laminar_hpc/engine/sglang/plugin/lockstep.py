"""Operations that all tensor-parallel ranks of an engine carry out in the same turns of their schedulers.

Each rank's scheduler has page allocator and prefix cache of its own. They stay alike, because SGLang gives
what rank 0 has received to all ranks at the beginning of a turn, and all make the same of it. Our operations
on them take the same way:

    Leader.orders ------- with SGLang's broadcast of requests -------> Operations.turn, on every rank
          ^                                                                  |
          '------- Report: this rank's part has ended (a Unix socket) -------'

An operation is a generator that returns its reply. It yields

    Part    what this rank does beside its scheduler. The operation goes on in the turn in which all ranks
            know that each has done its part, with what each has to say; else with KvRefused on all of them
    Until   what becomes true on all ranks in the same turn

So all ranks do the same between two yields, also after a KvRefused, and no clock but rank 0's counts. What a
program error ends on one rank only is ended on the others, and its move with it.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang.plugin import protocol

logger = logging.getLogger(__name__)
PART_SECONDS = 240.0  # the worker waits for move_calls.ANSWER_SECONDS


@dataclass(frozen=True)
class OperationPart:
    """`done` ends with a text for all ranks, or None, or with an exception."""

    done: Future
    seconds: float = field(default_factory=lambda: PART_SECONDS)

    @classmethod
    def at_once(cls, work: Callable[[], str]) -> "OperationPart":
        """A part that this call does itself."""
        done: Future[str] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return cls(done)


@dataclass(frozen=True)
class Until:
    """After `seconds` the operation is refused with the text `otherwise`."""

    true: Callable[[], bool]
    seconds: float
    otherwise: str


Wait = OperationPart | Until
Steps = Generator[Wait, list[str], protocol.PortReply]


class Begin(msgspec.Struct, tag=True, array_like=True):
    """An operation begins; `request` as it came through the port."""

    number: int
    request: bytes


class GoOn(msgspec.Struct, tag=True, array_like=True):
    """Wait `wait` of an operation is over. `values`: what each rank's part has ended with."""

    number: int
    wait: int
    error: str = ""
    values: list[str] = []


class Report(msgspec.Struct, tag=True, array_like=True):
    """A rank's part has ended."""

    number: int
    wait: int
    rank: int
    error: str
    value: str


class OperationLost(msgspec.Struct, tag=True, array_like=True):
    """A program error has ended an operation of this move on one rank."""

    move_id: str
    rank: int
    error: str


_orders = msgspec.msgpack.Decoder(list[Begin | GoOn])
_reports = msgspec.msgpack.Decoder(Report | OperationLost)
_encoder = msgspec.msgpack.Encoder()


def _reports_path(base: str) -> str:
    return os.path.join(os.path.dirname(base), "reports")


def refusal(name: str, error: Exception) -> protocol.OperationRefused:
    """A refusal of ours is a line already; of anything else the log has the traceback."""
    if isinstance(error, LaminarError):
        return protocol.OperationRefused(str(error))
    logger.error("engine port: %s failed", name, exc_info=error)
    return protocol.OperationRefused(f"{name}: {type(error).__name__}: {error}")


@dataclass
class Operation:
    """One under way on this rank. `stalled`: seconds that the scheduler has stood still for it."""

    number: int
    name: str
    move_id: str
    steps: Steps
    wait: Wait | None = None
    waits: int = 0  # the number of `wait`
    deadline: float = math.inf
    stalled: float = 0.0


@dataclass
class Operations:
    """Those under way on this rank. Everything but reports is the scheduler thread's. `ended` gets each
    operation's number and reply."""

    rank: int
    base: str  # as protocol.SOCKET_VARIABLE says
    start: Callable[[protocol.KvRequest], Steps]
    ended: Callable[[int, protocol.PortReply], None] = lambda number, reply: None
    under_way: dict[int, Operation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # a part may end in any thread
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        # never blocks
        self._socket.sndhwm = 0
        self._socket.linger = 0
        self._socket.connect(f"ipc://{_reports_path(self.base)}")

    def turn(self, orders: Sequence[bytes]) -> None:
        """Each turn, on all ranks with the same orders."""
        waiting = [o for o in self.under_way.values() if isinstance(o.wait, Until)]
        for order in (order for frame in orders for order in _orders.decode(frame)):
            if isinstance(order, Begin):
                self._begin(order)
            elif (operation := self.under_way.get(order.number)) and operation.waits == order.wait:
                self._step(operation, order.values, order.error)
        for operation in waiting:
            if operation.number not in self.under_way or not isinstance(operation.wait, Until):
                continue
            if operation.wait.true():
                self._step(operation, [])

    def _begin(self, order: Begin) -> None:
        request = protocol.decode_request(order.request)
        assert isinstance(request, protocol.KvRequest)
        operation = Operation(order.number, type(request).__name__, request.move_id, self.start(request))
        self.under_way[order.number] = operation
        self._step(operation)

    def _step(self, operation: Operation, values: list[str] | None = None, error: str = "") -> None:
        """To the next wait, or the end. At the beginning there are no `values`."""
        begin, steps = time.perf_counter(), operation.steps
        try:
            if error:
                wait = steps.throw(KvRefused(error))
            else:
                wait = next(steps) if values is None else steps.send(values)
        except StopIteration as end:
            reply = end.value
        except KvRefused as refused:
            reply = protocol.OperationRefused(str(refused))
        except Exception as failure:
            reply = refusal(operation.name, failure)
            self._say(OperationLost(operation.move_id, self.rank, reply.text))
        else:
            operation.stalled += time.perf_counter() - begin
            self._wait(operation, wait)
            return
        del self.under_way[operation.number]
        if isinstance(reply, protocol.KvDone):
            reply.stalled = operation.stalled + time.perf_counter() - begin
        self.ended(operation.number, reply)

    def _wait(self, operation: Operation, wait: Wait) -> None:
        operation.wait = wait
        operation.deadline = time.monotonic() + wait.seconds
        operation.waits += 1
        if not isinstance(wait, OperationPart):
            return
        number, name, which = operation.number, operation.name, operation.waits

        def report(done: Future) -> None:
            error = done.exception()
            why = refusal(name, error).text if isinstance(error, Exception) else str(error or "")
            self._say(Report(number, which, self.rank, why, "" if error else done.result() or ""))

        wait.done.add_done_callback(report)

    def _say(self, report: Report | OperationLost) -> None:
        with self._lock:
            self._socket.send(_encoder.encode(report))


class LockstepLeader:
    """Rank 0's: decides when operations begin and go on, and answers who asked for them. `expired`: moves
    whose time is over; they are ended unless an operation of theirs is under way."""

    def __init__(
        self,
        ranks: int,
        operations: Operations,
        reply: Callable[[bytes, protocol.PortReply], None],
        expired: Callable[[], list[str]],
    ) -> None:
        self.ranks = ranks
        self.operations = operations
        self.expired = expired
        self._reply = reply
        operations.ended = self._answer
        self._clients: dict[int, bytes] = {}
        self._next: list[Begin | GoOn] = []
        self._numbers = 0
        self._said: dict[tuple[int, int], dict[int, Report]] = {}  # operation and wait -> rank
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.rcvhwm = 0
        before = os.umask(0o177)  # the socket is made with mode 0600
        try:
            self.socket.bind(f"ipc://{_reports_path(operations.base)}")
        finally:
            os.umask(before)

    def ask(self, request: protocol.KvRequest, client: bytes = b"") -> None:
        """Begins with the next orders; nobody is answered without a client."""
        self._numbers += 1
        if client:
            self._clients[self._numbers] = client
        self._next.append(Begin(self._numbers, protocol.encode(request)))

    def orders(self) -> bytes:
        """What all ranks do in this turn, for `Operations.turn`; empty if that is nothing."""
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            self._take(_reports.decode(self.socket.recv()))
        under_way = list(self.operations.under_way.values())
        self._next += [verdict for operation in under_way if (verdict := self._verdict(operation))]
        busy = {operation.move_id for operation in under_way}
        for move_id in self.expired():
            if move_id not in busy:
                self.ask(protocol.KvEnd(move_id))
        orders = self._next
        self._next = []
        return _encoder.encode(orders) if orders else b""

    def _take(self, report: Report | OperationLost) -> None:
        if isinstance(report, Report):
            operation = self.operations.under_way.get(report.number)
            if operation is not None and operation.waits == report.wait:  # else given up before
                self._said.setdefault((report.number, report.wait), {})[report.rank] = report
            return
        text = self._of_rank(report.rank, report.error)
        self._next += [
            GoOn(operation.number, operation.waits, text)
            for operation in self.operations.under_way.values()
            if operation.move_id == report.move_id
        ]
        self.ask(protocol.KvEnd(report.move_id))

    def _verdict(self, operation: Operation) -> GoOn | None:
        number, which, wait = operation.number, operation.waits, operation.wait
        late = time.monotonic() > operation.deadline
        if isinstance(wait, Until):
            return GoOn(number, which, wait.otherwise) if late else None
        assert isinstance(wait, OperationPart)
        said = self._said.get((number, which), {})
        missing = [rank for rank in range(self.ranks) if rank not in said]
        if missing and not late:
            return None
        self._said.pop((number, which), None)
        if missing:
            names = ", ".join(map(str, missing))
            text = f"{operation.name}: tensor-parallel rank {names} took more than {wait.seconds:g} s"
            return GoOn(number, which, text)
        errors = [self._of_rank(rank, said[rank].error) for rank in sorted(said) if said[rank].error]
        return GoOn(number, which, errors[0] if errors else "", [said[r].value for r in range(self.ranks)])

    def _of_rank(self, rank: int, error: str) -> str:
        return f"{error} (tensor-parallel rank {rank})" if self.ranks > 1 else error

    def _answer(self, number: int, reply: protocol.PortReply) -> None:
        if client := self._clients.pop(number, None):
            self._reply(client, reply)
