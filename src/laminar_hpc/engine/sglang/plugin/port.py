"""The engine port: a Unix socket into each of SGLang's schedulers, for what its HTTP interface cannot do
(sums of live weights, KV moves).

A hook (hooks.py) runs the port in the scheduler's own thread at each turn of its loop, also while nothing is
being generated, so an operation sees the engine between two steps and needs no lock. An operation of a move
is asked of rank 0 and carried out by all ranks in the same turns (lockstep.py); its reply comes when all have
ended it. The socket's path comes from the environment, its folder is private to the user, frames are msgspec
structs: nothing is unpickled.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from laminar_hpc.engine.sglang.plugin import adapters, protocol
from laminar_hpc.engine.sglang.plugin.kv_cache import tensor_parallel
from laminar_hpc.engine.sglang.plugin.kv_destination import Destination
from laminar_hpc.engine.sglang.plugin.kv_moves import KvMoves
from laminar_hpc.engine.sglang.plugin.kv_source import KvSource
from laminar_hpc.engine.sglang.plugin.lockstep import LockstepLeader, Operations, Steps, refusal


def ping(scheduler: object, request: protocol.PortPing) -> protocol.PortReply:
    """Answers with the scheduler's process id."""
    return protocol.Alive(os.getpid())


def _views(scheduler: object) -> Iterator:
    from sglang.srt.runtime_context import get_parallel

    from laminar_hpc.engine.sglang.plugin.live_weights import canonical_views

    runner, experts = scheduler.tp_worker.model_runner, get_parallel().moe_ep_size
    return canonical_views(runner.model, runner.model_config.hf_config, *tensor_parallel(), experts)


def layout(scheduler: object, request: protocol.GetLayout) -> protocol.PortReply:
    """Which slices of canonical tensors this rank of the engine holds."""
    from laminar_hpc.engine.sglang.plugin.live_weights import live_layout

    return protocol.LiveLayout(live_layout(_views(scheduler)))


def sums(scheduler: object, request: protocol.GetSums) -> protocol.PortReply:
    """The sums of the live parameters of this rank."""
    from laminar_hpc.engine.sglang.plugin.live_weights import live_sums

    return protocol.LiveSums(live_sums(_views(scheduler)))


def load_weights(scheduler: object, request: protocol.LoadWeights) -> protocol.PortReply:
    """Loads a slot and answers with the sums of what is live; refused while requests run, unless paused."""
    from laminar_hpc.engine.sglang.plugin.load_slot import load_slot

    if not request.paused and not scheduler.flush_cache():  # also forgets the KV of the old weights
        return protocol.OperationRefused("LoadWeights: requests are running; drain the engine first")
    # a pause in place leaves a forward pass in flight, on a stream that the copies do not wait for
    # (scheduler.py:5593 and 1888)
    scheduler.device_module.synchronize()
    return protocol.LiveSums(load_slot(list(_views(scheduler)), Path(request.directory)))


def load_adapter(scheduler: object, request: protocol.LoadAdapter) -> protocol.PortReply:
    """Loads an adapter beside those that are there, and answers with the sums of what is live of it."""
    return adapters.load(scheduler, _views(scheduler), request)


def _unload_adapter(scheduler: object, request: protocol.UnloadAdapter) -> Steps:
    """Done in one turn: an operation without waits."""
    return adapters.unload(scheduler, request)
    yield  # makes it a generator


OPERATIONS: dict[type[protocol.PortRequest], Callable] = {
    protocol.PortPing: ping,
    protocol.GetLayout: layout,
    protocol.GetSums: sums,
    protocol.LoadWeights: load_weights,
    protocol.LoadAdapter: load_adapter,
}
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"


class EnginePort:
    """Answers requests in the scheduler's thread, and never blocks it. `base`: what SOCKET_VARIABLE says."""

    def __init__(self, scheduler: Any, base: str, rank: int, ranks: int) -> None:
        self.scheduler = scheduler
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        before = os.umask(0o177)  # the socket is made with mode 0600
        try:
            self.socket.bind(f"ipc://{protocol.socket_path(base, rank)}")
        finally:
            os.umask(before)
        self._received: list[tuple[bytes, protocol.PortRequest]] = []
        self._has_read = False
        self.kv = KvMoves(scheduler)
        self.source = KvSource(self.kv)
        self.destination = Destination(self.kv)
        self.operations = Operations(rank, base, self._start)
        self.leader = None
        if rank == 0:
            self.leader = LockstepLeader(ranks, self.operations, self.reply, self.kv.expired)
        sleeper = getattr(scheduler, "idle_sleeper", None)
        # --sleep-on-idle: the first rank wakes up for the port too, and the others take each turn with it
        if sleeper is not None and self.leader is not None:
            sleeper.poller.register(self.socket, zmq.POLLIN)
            sleeper.poller.register(self.leader.socket, zmq.POLLIN)

    def _start(self, request: protocol.KvRequest) -> Steps:
        match request:
            case protocol.KvReserve():
                return self.destination.reserve(request)
            case protocol.KvImport():
                return self.destination.take(request)
            case protocol.KvSend():
                return self.source.send(request)
            case protocol.KvDetach():
                return self.source.detach(request)
            case protocol.KvSendKept():
                return self.source.send_kept(request)
            case protocol.KvEnd():
                return self.kv.end(request)
            case protocol.UnloadAdapter():
                return _unload_adapter(self.scheduler, request)
        raise AssertionError(f"{type(request).__name__} has no operation")

    def orders(self) -> bytes:
        """Of rank 0, before SGLang's broadcast: what all ranks do in this turn."""
        assert self.leader is not None
        self._read()
        self._has_read = True
        return self.leader.orders()

    def turn(self, orders: Sequence[bytes]) -> None:
        """Carries out the orders; every rank calls it after the broadcast."""
        # what rank 0 read only now would have no orders in this turn, and an idle scheduler's next may be far
        if not self._has_read:
            self._read()
        self._has_read = False
        received = self._received
        self._received = []
        for client, request in received:  # all ranks load weights at the same time
            self._answer(client, request)
        self.operations.turn(orders)

    def _read(self) -> None:
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            client, *_, frame = self.socket.recv_multipart()
            try:
                request = protocol.decode_request(frame)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                self.reply(client, protocol.OperationRefused(f"not a request of this port: {error}"))
                continue
            if isinstance(request, protocol.KvRequest):
                self._ask(client, request)
            else:
                self._received.append((client, request))

    def reply(self, client: bytes, reply: protocol.PortReply) -> None:
        self.socket.send_multipart([client, b"", protocol.encode(reply)])

    def _answer(self, client: bytes, request: protocol.PortRequest) -> None:
        try:
            self.reply(client, OPERATIONS[type(request)](self.scheduler, request))
        except Exception as error:
            # a failed operation must not end the engine; the caller decides what it means
            self.reply(client, refusal(type(request).__name__, error))

    def _ask(self, client: bytes, request: protocol.KvRequest) -> None:
        if self.leader is None:
            self.reply(client, protocol.OperationRefused("KV move refused: it is rank 0 that is asked"))
        else:
            self.leader.ask(request, client)


_port: EnginePort | None = None  # a process has one scheduler


def before_broadcast(original: Callable, receiver: object) -> list | None:
    """Hook around SchedulerRequestReceiver._pull_raw_reqs, which gives rank 0 what it then broadcasts: our
    orders go with it, as bytes."""
    received = original(receiver)
    if _port is not None and _port.leader is not None and (orders := _port.orders()):
        received.append(orders)
    return received


def before_requests(scheduler: Any, received: list) -> None:
    """Hook: runs in the scheduler's thread before each turn's requests, on every rank."""
    global _port
    if _port is None:
        _port = EnginePort(scheduler, os.environ[protocol.SOCKET_VARIABLE], *tensor_parallel())
    orders = [item for item in received if isinstance(item, bytes)]
    if orders:
        received[:] = [item for item in received if not isinstance(item, bytes)]
    _port.turn(orders)


def before_flush(scheduler: object, *_: object, **__: object) -> None:
    """Hook: the pool is about to be cleared."""
    if _port is not None:
        _port.kv.drop_all()


def load_snapshot_path(instance: str) -> str:
    """Hook: where the scheduler leaves its utilization; in /dev/shm a killed engine's would stay for
    ever."""
    return os.path.join(
        os.path.dirname(os.environ[protocol.SOCKET_VARIABLE]),
        f"loads_{hashlib.sha256(instance.encode()).hexdigest()[:12]}",
    )
