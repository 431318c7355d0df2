"""The engine port: a Unix socket into each of SGLang's schedulers, for what its HTTP interface cannot do
(sums of live weights, KV moves).

A hook (hooks.py) runs the port in the scheduler's own thread at each turn of its loop, also while nothing is
being generated, so an operation sees the engine between two steps and needs no lock. An operation that waits
for threads or for the engine is a generator: it goes on one step per turn, and its reply comes when it has
ended. The socket's path comes from the environment, its folder is private to the user, frames are msgspec
structs: nothing is unpickled.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.plugin.kv_cache import tensor_parallel
from laminar_hpc.engine.sglang.plugin.kv_moves import KvMoves, Steps

logger = logging.getLogger(__name__)


def ping(scheduler: object, request: protocol.Ping) -> protocol.Reply:
    """Answers with the scheduler's process id."""
    return protocol.Alive(os.getpid())


def _views(scheduler: object) -> Iterator:
    from laminar_hpc.engine.sglang.plugin.live_weights import canonical_views

    runner = scheduler.tp_worker.model_runner
    return canonical_views(runner.model, runner.model_config.hf_config, *tensor_parallel())


def layout(scheduler: object, request: protocol.GetLayout) -> protocol.Reply:
    """Which slices of canonical tensors this rank of the engine holds."""
    from laminar_hpc.engine.sglang.plugin.live_weights import live_layout

    return protocol.LiveLayout(live_layout(_views(scheduler)))


def sums(scheduler: object, request: protocol.GetSums) -> protocol.Reply:
    """The sums of the live parameters of this rank."""
    from laminar_hpc.engine.sglang.plugin.live_weights import live_sums

    return protocol.LiveSums(live_sums(_views(scheduler)))


def load_weights(scheduler: object, request: protocol.LoadWeights) -> protocol.Reply:
    """Loads a slot and answers with the sums of what is live; refused while requests run, unless paused."""
    from laminar_hpc.engine.sglang.plugin.load_slot import load_slot

    if not request.paused and not scheduler.flush_cache():  # also forgets the KV of the old weights
        return protocol.Refused("LoadWeights: requests are running; drain the engine first")
    # a pause in place leaves a forward pass in flight, on a stream that the copies do not wait for
    # (scheduler.py:5593 and 1888)
    scheduler.device_module.synchronize()
    return protocol.LiveSums(load_slot(list(_views(scheduler)), Path(request.directory)))


OPERATIONS: dict[type[protocol.Request], Callable] = {
    protocol.Ping: ping,
    protocol.GetLayout: layout,
    protocol.GetSums: sums,
    protocol.LoadWeights: load_weights,
}
KV_OPERATIONS: dict[type[protocol.Request], Callable[[KvMoves, protocol.Request], Steps]] = {
    protocol.KvReserve: KvMoves.reserve,
    protocol.KvSend: KvMoves.send,
    protocol.KvDetach: KvMoves.detach,
    protocol.KvImport: KvMoves.take,
    protocol.KvEnd: KvMoves.end,
}


@dataclass
class Pending:
    """An operation under way, and the seconds that the scheduler has stood still for it."""

    client: bytes
    name: str
    steps: Steps
    stalled: float = 0.0


class EnginePort:
    """Answers requests in the scheduler's thread; `poll` never blocks."""

    def __init__(self, scheduler: object, path: str) -> None:
        self.scheduler = scheduler
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        before = os.umask(0o177)  # the socket is made with mode 0600
        try:
            self.socket.bind(f"ipc://{path}")
        finally:
            os.umask(before)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.kv = KvMoves(scheduler, lambda: os.eventfd_write(self.wake, 1))
        self.pending: list[Pending] = []
        sleeper = getattr(scheduler, "idle_sleeper", None)
        # --sleep-on-idle: the first rank wakes up for the port too, and the others take each turn with it
        if sleeper is not None:
            sleeper.poller.register(self.socket, zmq.POLLIN)
            sleeper.poller.register(self.wake, zmq.POLLIN)

    def poll(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)  # else the idle scheduler could not sleep any more
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            client, *_, frame = self.socket.recv_multipart()
            self.answer(client, frame)
        if self.pending or self.kv.moves or self.kv.leaving:
            self.turn()

    def turn(self) -> None:
        """One step of each operation under way."""
        # first: an operation may wait for what it gives back, and an idle scheduler's next turn may be far
        self.kv.tidy()
        before, self.pending = self.pending, []
        for operation in before:
            self.step(operation)

    def reply(self, client: bytes, reply: protocol.Reply) -> None:
        self.socket.send_multipart([client, b"", protocol.encode(reply)])

    def answer(self, client: bytes, frame: bytes) -> None:
        try:
            request = protocol.decode_request(frame)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self.reply(client, protocol.Refused(f"not a request of this port: {error}"))
            return
        name = type(request).__name__
        if start := KV_OPERATIONS.get(type(request)):
            self.step(Pending(client, name, start(self.kv, request)))
            return
        try:
            self.reply(client, OPERATIONS[type(request)](self.scheduler, request))
        except Exception as error:
            # a failed operation must not end the engine; the caller decides what it means
            self.reply(client, refusal(name, error))

    def step(self, operation: Pending) -> None:
        begin = time.perf_counter()
        try:
            reply = next(operation.steps)
        except Exception as error:
            reply = refusal(operation.name, error)
        operation.stalled += time.perf_counter() - begin
        if reply is None:
            self.pending.append(operation)
            return
        operation.steps.close()
        if isinstance(reply, protocol.KvDone):
            reply.stalled = operation.stalled
        self.reply(operation.client, reply)


def refusal(name: str, error: Exception) -> protocol.Refused:
    """A refusal of ours is a line already; of anything else the log has the traceback."""
    if isinstance(error, LaminarError):
        return protocol.Refused(str(error))
    logger.error("engine port: %s failed", name, exc_info=error)
    return protocol.Refused(f"{name}: {type(error).__name__}: {error}")


def before_requests(scheduler: object, *_: object) -> None:
    """Hook: runs in the scheduler's thread before each turn's requests."""
    port = scheduler.__dict__.get("laminar_port")
    if port is None:
        path = protocol.socket_path(os.environ[protocol.SOCKET_VARIABLE], tensor_parallel()[0])
        port = scheduler.__dict__["laminar_port"] = EnginePort(scheduler, path)
    port.poll()


def before_flush(scheduler: object, *_: object, **__: object) -> None:
    """Hook: the pool is about to be cleared."""
    port = scheduler.__dict__.get("laminar_port")
    if port is not None:
        port.kv.drop_all()


def load_snapshot_path(instance: str) -> str:
    """Hook: where the scheduler leaves its utilization; in /dev/shm a killed engine's would stay for
    ever."""
    return os.path.join(
        os.path.dirname(os.environ[protocol.SOCKET_VARIABLE]),
        f"loads_{hashlib.sha256(instance.encode()).hexdigest()[:12]}",
    )
