"""The processes in which users' functions run: `python -m laminar_hpc.environments.workers.process`, started
by fork_server.py; under another interpreter through elsewhere.py.

The first is a fork server: it imports the user's functions once (functions.py) and then only forks, so
that a worker is there within milliseconds and shares the memory of what was imported. Between it and each
worker is a keeper, which ends all that the worker starts (keeper.py). A worker answers calls on its
socket, in one of two ways:

    one at a time   plain functions, in its main thread; the rollout kills the worker when the time is over
    together        async functions, as tasks on one event loop, which bounds their time and ticks; silence
                    means that the loop is stuck

Every process ends with its parent or its socket. Imports nothing heavy, and of other packages only those of
interpreter.py.
"""

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from laminar_hpc.cluster.own_time import within
from laminar_hpc.cluster.processes import die_with_parent
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.workers import keeper
from laminar_hpc.environments.workers.framing import encode, framed, read_frame, receive_frame, write_frame
from laminar_hpc.environments.workers.functions import Served, answered, load_all, ready, result
from laminar_hpc.environments.workers.protocol import (
    Call,
    Fork,
    Forked,
    Ready,
    Reap,
    Result,
    Setup,
    Tick,
    decode_to_server,
    decode_to_worker,
)

TICK_SECONDS = 0.2
MAX_PACKET = 1 << 20  # bytes of a message to the fork server

# ---- a worker, one call at a time --------------------------------------------------------------------------


async def _awaited(value: Any) -> object:
    return await value


def serve_one_by_one(connection: socket.socket, rewards: dict[str, Served]) -> None:
    """Answers one call after the other, until the other end closes the connection."""
    while (frame := receive_frame(connection)) is not None:
        call = decode_to_worker(frame)
        assert isinstance(call, Call)
        reward, t0 = rewards[call.name], time.time()
        try:
            value = reward.call(call)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = reward.result(call, value, t0)
        except BaseException as error:  # sys.exit() in a reward function is its failure, not ours
            answer = result(call, t0, error)
        connection.sendall(answered(call, answer))


# ---- a worker, calls together ------------------------------------------------------------------------------


async def _answer(reward: Served, call: Call, limit: float) -> Result:
    t0 = time.time()

    async def body() -> Result:
        try:
            value = reward.call(call)
            return reward.result(call, await value if inspect.isawaitable(value) else value, t0)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return result(call, t0, error)

    task = asyncio.create_task(body())
    with contextlib.suppress(TimeoutError):
        async with within(limit):
            await asyncio.wait((task,))
    if not task.done():
        task.cancel()  # not awaited: the function may refuse to be cancelled
        return Result(call.id, 0.0, {}, t0, time.time(), f"no result within {limit:g} s", "time")
    return result(call, t0, RuntimeError("it was cancelled")) if task.cancelled() else task.result()


async def serve_together(connection: socket.socket, rewards: dict[str, Served], limit: float) -> None:
    """Answers calls side by side in one event loop, each within `limit` seconds, and ticks while the loop
    runs."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task] = set()  # the loop itself holds tasks weakly

    async def one(call: Call) -> None:
        writer.write(answered(call, await _answer(rewards[call.name], call, limit)))

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            write_frame(writer, Tick())

    ticking = asyncio.create_task(tick())
    while True:
        try:
            call = decode_to_worker(await read_frame(reader))
        except asyncio.IncompleteReadError:
            ticking.cancel()
            return
        assert isinstance(call, Call)
        task = asyncio.create_task(one(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


# ---- processes ---------------------------------------------------------------------------------------------


def _follow(parent: int) -> bool:
    """Whether the parent is there; if so, this process ends with it."""
    die_with_parent()
    return os.getppid() == parent


def work(connection: socket.socket, together: bool, rewards: dict[str, Served] | None) -> None:
    """The life of a worker. `rewards` None: it has been started afresh and imports them itself."""
    frame = receive_frame(connection)
    setup = decode_to_worker(frame) if frame else None
    if not isinstance(setup, Setup):
        return
    if rewards is None:
        try:
            rewards = load_all(setup)
        except LaminarError as error:
            connection.sendall(framed(Ready(str(error))))
            return
    connection.sendall(framed(ready(rewards)))
    if together:
        asyncio.run(serve_together(connection, rewards, setup.timeout_seconds))
    else:
        serve_one_by_one(connection, rewards)


def _child(
    control: socket.socket,
    fd: int,
    told: int,
    server: int,
    together: bool,
    rewards: dict[str, Served],
    threads: bool,
) -> None:
    """What a forked process does, a worker's keeper; it never returns to the server's loop."""
    try:
        control.close()
        if threads:  # a fork of a process with threads may find locks that nobody will ever release
            for descriptor in (fd, told):
                os.set_inheritable(descriptor, True)
            kind = "together" if together else "one_by_one"
            ours = len(sys.orig_argv) - len(sys.argv) + 1  # how this interpreter was started, without words
            words = [kind, str(fd), str(server), str(told)]
            os.execv(sys.executable, [*sys.orig_argv[:ours], *words])
        keeper.keep(server, told, lambda: _worker(fd, together, rewards))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _worker(fd: int, together: bool, rewards: dict[str, Served] | None) -> None:
    try:
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # the random module sees to itself
        work(socket.socket(fileno=fd), together, rewards)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


class _Keepers:
    """The workers' keepers, in the fork server."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}  # worker -> keeper
        self._ending: list[int] = []

    def fork(self, child: Callable[[int], None]) -> int:
        """The pid of a new worker. `child` gets the descriptor that its keeper tells it by. Raises
        OSError."""
        reading, told = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            child(told)
        os.close(told)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        if not said:
            raise OSError("a worker's keeper has died")
        worker = int(said)
        self._of[worker] = pid
        return worker

    def end(self, worker: int) -> None:
        """It and all that it has started, soon."""
        keeper = self._of.pop(worker, None)
        if keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGTERM)
            self._ending.append(keeper)
        self._ending = [pid for pid in self._ending if os.waitpid(pid, os.WNOHANG) == (0, 0)]


def serve_forks(control: socket.socket) -> None:
    """The fork server: one packet, one message. It runs no user code after the import, so it always
    answers."""
    setup = decode_to_server(control.recv(MAX_PACKET))
    assert isinstance(setup, Setup)
    try:
        rewards = load_all(setup)
    except LaminarError as error:
        control.send(encode(Ready(str(error))))
        return
    threads = len(os.listdir("/proc/self/task")) > 1
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, the memory that it shares
    control.send(encode(ready(rewards)))
    keepers = _Keepers()
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        if not packet:
            return
        message = decode_to_server(packet)
        if isinstance(message, Reap):
            keepers.end(message.pid)
        elif isinstance(message, Fork):
            words = (os.getpid(), message.together, rewards, threads)
            pid = keepers.fork(lambda told: _child(control, fds[0], told, *words))  # noqa: B023
            os.close(fds[0])
            control.send(encode(Forked(pid)))


def main() -> None:
    """The process that the pool starts: a worker, or the server that forks workers. Does not return."""
    kind, fd, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "server":
        if _follow(parent):
            serve_forks(socket.socket(fileno=fd))
    else:
        keeper.keep(parent, int(sys.argv[4]), lambda: _worker(fd, kind == "together", None))
    sys.stdout.flush()
    os._exit(0)  # threads of the user's modules are not waited for


if __name__ == "__main__":
    main()
