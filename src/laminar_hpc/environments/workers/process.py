"""The processes in which users' code runs: `python -m laminar_hpc.environments.workers.process`, started by
fork_server.py; under another interpreter through elsewhere.py.

The first is a fork server: it imports the user's functions once (functions.py) and then only forks, so that a
worker is there within milliseconds and shares the memory of what was imported. Between it and each worker is
a keeper, which ends all that the worker starts (keeper.py). A worker answers calls on its socket, in one of
two ways:

    one at a time   plain functions, in its main thread; the rollout kills the worker when the time is over
    together        async functions, as tasks on one event loop, which bounds their time and ticks; silence
                    means that the loop is stuck

If the setup names a program, nothing is imported and each worker becomes that program.

Every process ends with its parent or its socket. Imports nothing heavy, and of other packages only those of
interpreter.py.
"""

import asyncio
import contextlib
import gc
import inspect
import os
import resource
import signal
import socket
import sys
import time
import traceback
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.isolation import limits
from laminar_hpc.environments.workers import keeper, protocol
from laminar_hpc.environments.workers.framing import encode, framed, read_frame, receive_frame
from laminar_hpc.environments.workers.functions import Served, answered, load_all, ready, result
from laminar_hpc.machine.own_time import within
from laminar_hpc.machine.processes import die_with_parent

TICK_SECONDS = 0.2
MAX_PACKET = 1 << 20  # bytes of a message to the fork server
_LARGEST_FILE = 4 << 30  # bytes that a function may write into one
_OTHERS_TASKS = 4096  # processes and threads that may come to those of this user
Functions = dict[str, Served]  # by name of the reward, tool or environment

# ---- a worker, one call at a time --------------------------------------------------------------------------


async def _awaited(value: Any) -> object:
    return await value


def serve_one_by_one(connection: socket.socket, functions: Functions) -> None:
    """Answers one call after the other, until the other end closes the connection."""
    while (frame := receive_frame(connection)) is not None:
        call = protocol.decode_to_worker(frame)
        assert isinstance(call, protocol.Call)
        function, t0 = functions[call.name], time.time()
        try:
            value = function.call(call)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = function.result(call, value, t0)
        except BaseException as error:  # sys.exit() in a reward function is its failure, not ours
            answer = result(call, t0, error)
        connection.sendall(answered(call, answer))


# ---- a worker, calls together ------------------------------------------------------------------------------


async def _answer(function: Served, call: protocol.Call, limit: float) -> protocol.CallResult:
    t0 = time.time()

    async def body() -> protocol.CallResult:
        try:
            value = function.call(call)
            return function.result(call, await value if inspect.isawaitable(value) else value, t0)
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
        return protocol.CallResult(call.id, 0.0, {}, t0, time.time(), f"no result within {limit:g} s", "time")
    return result(call, t0, RuntimeError("it was cancelled")) if task.cancelled() else task.result()


async def serve_together(connection: socket.socket, functions: Functions, limit: float) -> None:
    """Answers calls side by side in one event loop, each within `limit` seconds; ticks while it runs."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task] = set()  # the loop itself holds tasks weakly

    async def one(call: protocol.Call) -> None:
        writer.write(answered(call, await _answer(functions[call.name], call, limit)))

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            writer.write(framed(protocol.Tick()))

    ticking = asyncio.create_task(tick())
    while True:
        try:
            call = protocol.decode_to_worker(await read_frame(reader))
        except asyncio.IncompleteReadError:
            ticking.cancel()
            return
        assert isinstance(call, protocol.Call)
        task = asyncio.create_task(one(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


# ---- processes ---------------------------------------------------------------------------------------------


def _limit() -> None:
    """Of the worker and all that it starts. Memory has no limit, as models are loaded too; when it runs out,
    the kernel ends these processes first."""
    limits.prefer_for_killing()
    limits.lower(resource.RLIMIT_CORE, 0)
    limits.lower(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    if os.geteuid() != 0:  # the kernel does not count root's
        limits.lower(resource.RLIMIT_NPROC, limits.tasks_of_user() + _OTHERS_TASKS)


def work(fd: int, together: bool, functions: Functions | None) -> None:
    """The life of a worker. `functions` None: it has been started afresh and imports them itself."""
    _limit()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the random module sees to itself
    connection = socket.socket(fileno=fd)
    frame = receive_frame(connection)
    setup = protocol.decode_to_worker(frame) if frame else None
    if not isinstance(setup, protocol.WorkerSetup):
        return
    if functions is None:
        try:
            functions = load_all(setup)
        except LaminarError as error:
            connection.sendall(framed(protocol.Ready(str(error))))
            return
    connection.sendall(framed(ready(functions)))
    if together:
        asyncio.run(serve_together(connection, functions, setup.timeout_seconds))
    else:
        serve_one_by_one(connection, functions)


def _guarded(fd: int, together: bool, functions: Functions | None) -> None:
    """`work` in a process that never returns into the code that forked it."""
    try:
        work(fd, together, functions)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


class Server:
    """The fork server: one packet, one message. After the import it runs no user code, so it answers."""

    def __init__(self, control: socket.socket, setup: protocol.WorkerSetup, functions: Functions) -> None:
        self._control = control
        self._setup = setup
        self._functions = functions
        self._threads = len(os.listdir("/proc/self/task")) > 1
        self._keepers: dict[int, int] = {}  # by worker
        self._ending: list[int] = []

    def serve(self) -> None:
        """Serves until the other side is gone, then ends all workers."""
        while True:
            packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, 1)
            if not packet:
                break
            message = protocol.decode_to_server(packet)
            if isinstance(message, protocol.Reap):
                self._end(message.pid)
            elif isinstance(message, protocol.Fork):
                pid = self._fork(fds[0], message.together)
                os.close(fds[0])
                self._control.send(encode(protocol.Forked(pid)))
        for worker in list(self._keepers):
            self._end(worker)
        for ending in self._ending:
            os.waitpid(ending, 0)

    def _fork(self, fd: int, together: bool) -> int:
        """The pid of a new worker, which serves this socket. Raises OSError."""
        reading, told = os.pipe()
        server = os.getpid()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._child(fd, told, server, together)
        os.close(told)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        if not said:
            raise OSError("a worker's keeper has died")
        self._keepers[int(said)] = pid
        return int(said)

    def _child(self, fd: int, told: int, server: int, together: bool) -> None:
        """What a forked process does, a worker's keeper; it never returns to the server's loop."""
        try:
            self._control.close()
            os.set_inheritable(fd, bool(self._setup.program) or self._threads)
            if self._threads:  # a fork of a process with threads may find locks that nobody will ever release
                os.set_inheritable(told, True)
                ours = len(sys.orig_argv) - len(sys.argv) + 1  # how this interpreter was started, no words
                words = ["together" if together else "one_by_one", str(fd), str(server), str(told)]
                os.execv(sys.executable, [*sys.orig_argv[:ours], *words])
            if program := self._setup.program:
                words = [*program, str(fd)]
                keeper.keep(server, told, lambda: os.execv(words[0], words), protocol.END_SECONDS)
            keeper.keep(server, told, lambda: _guarded(fd, together, self._functions), 0.0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _end(self, worker: int) -> None:
        """It and all that it has started, soon."""
        if (pid := self._keepers.pop(worker, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            self._ending.append(pid)
        self._ending = [pid for pid in self._ending if os.waitpid(pid, os.WNOHANG) == (0, 0)]


def _serve_forks(control: socket.socket) -> None:
    setup = protocol.decode_to_server(control.recv(MAX_PACKET))
    assert isinstance(setup, protocol.WorkerSetup)
    try:
        functions = {} if setup.program else load_all(setup)
    except LaminarError as error:
        control.send(encode(protocol.Ready(str(error))))
        return
    server = Server(control, setup, functions)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, the memory that it shares
    control.send(encode(protocol.OF_A_PROGRAM if setup.program else ready(functions)))
    server.serve()


def main() -> None:
    """The process that the pool starts: a worker, or the server that forks workers. Does not return."""
    kind, fd, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind != "server":
        keeper.keep(parent, int(sys.argv[4]), lambda: _guarded(fd, kind == "together", None), 0.0)
    die_with_parent()
    if os.getppid() == parent:
        _serve_forks(socket.socket(fileno=fd))
    sys.stdout.flush()
    os._exit(0)  # threads of the user's modules are not waited for


if __name__ == "__main__":
    main()
