"""The engine port: a Unix socket into each of SGLang's schedulers, for what its HTTP interface cannot do (sums of the live weights).

SGLang calls `register` in each of its processes (entry point group `sglang.srt.plugins`). A hook runs the port in the scheduler's own
thread at each turn of its loop, also while nothing is being generated, so an operation sees the engine between two steps and needs no lock.
The socket's path comes from the environment, its folder is private to the user, frames are msgspec structs: nothing is unpickled.
"""

import hashlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.rollout.sglang_plugin import cpu_hooks, protocol

logger = logging.getLogger(__name__)


def ping(scheduler: object, request: protocol.Ping) -> protocol.Reply:
    return protocol.Alive(os.getpid())


def tensor_parallel() -> tuple[int, int]:
    """This scheduler's rank, and how many there are."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group.rank_in_group, group.world_size


def _views(scheduler: object) -> Iterator:
    from laminar_hpc.rollout.sglang_plugin.live_weights import canonical_views

    runner = scheduler.tp_worker.model_runner
    return canonical_views(runner.model, runner.model_config.hf_config, *tensor_parallel())


def layout(scheduler: object, request: protocol.Layout) -> protocol.Reply:
    from laminar_hpc.rollout.sglang_plugin.live_weights import live_layout

    return protocol.LiveLayout(live_layout(_views(scheduler)))


def sums(scheduler: object, request: protocol.Sums) -> protocol.Reply:
    from laminar_hpc.rollout.sglang_plugin.live_weights import live_sums

    return protocol.LiveSums(live_sums(_views(scheduler)))


def load(scheduler: object, request: protocol.Load) -> protocol.Reply:
    from laminar_hpc.rollout.sglang_plugin.load import load_slot

    if not request.paused and not scheduler.flush_cache():  # also forgets the KV of the old weights
        return protocol.Refused("Load: requests are running; drain the engine first")
    return protocol.LiveSums(load_slot(list(_views(scheduler)), Path(request.directory)))


OPERATIONS: dict[type[protocol.Request], Callable] = {
    protocol.Ping: ping,
    protocol.Layout: layout,
    protocol.Sums: sums,
    protocol.Load: load,
}


class EnginePort:
    """Answers requests in the scheduler's thread; `poll` never blocks."""

    def __init__(self, scheduler: object, path: str) -> None:
        self.scheduler = scheduler
        self.socket = zmq.Context.instance().socket(zmq.REP)
        before = os.umask(0o177)  # the socket is made with mode 0600
        try:
            self.socket.bind(f"ipc://{path}")
        finally:
            os.umask(before)
        sleeper = getattr(scheduler, "idle_sleeper", None)
        if sleeper is not None:  # --sleep-on-idle: the first rank wakes up for the port too, and the others take each turn with it
            sleeper.poller.register(self.socket, zmq.POLLIN)

    def poll(self) -> None:
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            self.socket.send(protocol.encode(self.answer(self.socket.recv())))

    def answer(self, frame: bytes) -> protocol.Reply:
        try:
            request = protocol.decode_request(frame)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return protocol.Refused(f"not a request of this port: {error}")
        try:
            return OPERATIONS[type(request)](self.scheduler, request)
        except Exception as error:  # a failed operation must not end the engine; the caller decides what it means
            logger.exception("engine port: %s failed", type(request).__name__)
            return protocol.Refused(f"{type(request).__name__}: {type(error).__name__}: {error}")


def before_requests(scheduler: object, *_: object) -> None:
    """Hook: runs in the scheduler's thread before each turn's requests."""
    port = scheduler.__dict__.get("laminar_port")
    if port is None:
        path = protocol.socket_path(os.environ[protocol.SOCKET_VARIABLE], tensor_parallel()[0])
        port = scheduler.__dict__["laminar_port"] = EnginePort(scheduler, path)
    port.poll()


def load_snapshot_path(instance: str) -> str:
    """Hook: where the scheduler leaves its load figures; in /dev/shm a killed engine's would stay for ever."""
    return os.path.join(
        os.path.dirname(os.environ[protocol.SOCKET_VARIABLE]), f"loads_{hashlib.sha256(instance.encode()).hexdigest()[:12]}"
    )


def register() -> None:
    """Entry point: hooks the port into the scheduler where the environment names a socket; a plain SGLang is left alone."""
    if not os.environ.get(protocol.SOCKET_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.process_input_requests", before_requests, HookType.BEFORE)
    if importlib.util.find_spec("sglang.srt.managers.load_snapshot"):  # not in 0.5.17
        HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", load_snapshot_path, HookType.REPLACE)
    cpu_hooks.register()
