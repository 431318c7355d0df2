"""The engine port: a Unix socket into SGLang's scheduler, for what its HTTP interface cannot do (sums of the live weights).

SGLang calls `register` in each of its processes (entry point group `sglang.srt.plugins`). A hook runs the port in the scheduler's own
thread at each turn of its loop, also while nothing is being generated, so an operation sees the engine between two steps and needs no lock.
The socket's path comes from the environment, its folder is private to the user, frames are msgspec structs: nothing is unpickled.
"""

import logging
import os
from collections.abc import Callable

import msgspec
import zmq

from laminar_hpc.rollout.sglang_plugin import cpu_hooks, protocol

logger = logging.getLogger(__name__)


def ping(scheduler: object, request: protocol.Ping) -> protocol.Reply:
    return protocol.Alive(os.getpid())


def layout(scheduler: object, request: protocol.Layout) -> protocol.Reply:
    from laminar_hpc.rollout.sglang_plugin.live_weights import live_layout

    runner = scheduler.tp_worker.model_runner
    return protocol.LiveLayout(live_layout(runner.model, runner.model_config.hf_config))


def sums(scheduler: object, request: protocol.Sums) -> protocol.Reply:
    from laminar_hpc.rollout.sglang_plugin.live_weights import live_sums

    runner = scheduler.tp_worker.model_runner
    return protocol.LiveSums(live_sums(runner.model, runner.model_config.hf_config))


OPERATIONS: dict[type[protocol.Request], Callable] = {protocol.Ping: ping, protocol.Layout: layout, protocol.Sums: sums}


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
        if sleeper is not None:  # --sleep-on-idle: wake up for the port too
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
        port = scheduler.__dict__["laminar_port"] = EnginePort(scheduler, os.environ[protocol.SOCKET_VARIABLE])
    port.poll()


def register() -> None:
    """Entry point: hooks the port into the scheduler where the environment names a socket; a plain SGLang is left alone."""
    if not os.environ.get(protocol.SOCKET_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.process_input_requests", before_requests, HookType.BEFORE)
    cpu_hooks.register()
