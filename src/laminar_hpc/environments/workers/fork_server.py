"""The rollout's side of a fork server (process.py): it starts the server, has workers forked, ends them, and
bounds what they print. Used by crews.py on one event loop."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from typing import BinaryIO

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.workers import protocol
from laminar_hpc.environments.workers.framing import encode, framed, read_frame
from laminar_hpc.environments.workers.interpreter import OURS, Interpreter
from laminar_hpc.machine.own_time import within

IMPORT_SECONDS = 60.0  # longest import of the user's modules
START_SECONDS = 120.0  # longest start of a program
# bytes of what workers print that go into the rollout's log; the rest is dropped
MAX_OUTPUT = 4 << 20
_SHOWN = 200  # characters of what a program has printed last
_MAX_PACKET = 1 << 17


# What launchers tell their processes, and our own keys; a function keeps the rest of its user's environment.
_NOT_FOR_FUNCTIONS = re.compile(
    r"LAMINAR_|WANDB_|TORCHELASTIC_|MASTER_|GROUP_|ROLE_|TORCH_NCCL_|(LOCAL_)?(RANK|WORLD_SIZE)$"
)


def environment(kept: Collection[str] = ()) -> dict[str, str]:
    """Of the processes that run users' code. `kept`: names that a reward behind a URL needs."""
    inherited = {n: v for n, v in os.environ.items() if n in kept or not _NOT_FOR_FUNCTIONS.match(n)}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class WorkerLost(Exception):
    """The worker died, or was given up, before it answered."""


class Worker:
    """One process and the calls that it has."""

    def __init__(
        self, pid: int, server: "ForkServer", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self.began = 0.0
        self.slowed = False
        self.frames = 0  # that it has sent
        self.calls: dict[int, asyncio.Future[protocol.CallResult]] = {}
        self._lost = False
        self._server = server
        assert server.process is not None
        self._process = server.process  # while it lives, the pid is this worker's, also when it is dead
        self._writer = writer
        self.listener = asyncio.create_task(self._listen(reader))

    @property
    def retired(self) -> bool:
        """It gets no more calls: it is lost, or dies with its server."""
        return self._lost or self._process.poll() is not None

    async def ask(self, call: protocol.Call, limit: float | None = None) -> protocol.CallResult:
        """Raises WorkerLost, and TimeoutError after `limit` seconds."""
        self.calls[call.id] = waiter = asyncio.get_running_loop().create_future()
        try:
            if self.retired:
                raise WorkerLost
            self._writer.write(framed(call, self._server.encode))
            async with within(limit):
                return await waiter
        finally:
            del self.calls[call.id]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = self._server.decode(await read_frame(reader))
                self.frames += 1
                waiter = self.calls.get(message.id) if isinstance(message, protocol.CallResult) else None
                if waiter is not None and not waiter.done():
                    waiter.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            self.lose()  # the last of these: a function wrote into our socket

    def lose(self) -> None:
        """Everything in flight is lost with it."""
        self._lost = True
        for waiter in self.calls.values():
            if not waiter.done():
                waiter.set_exception(WorkerLost())

    def kill(self) -> None:
        """With all that it has started; a program is left to its keeper."""
        self.lose()
        self.listener.cancel()
        self._writer.close()
        if self._server.setup.program or self._process.poll() is not None:
            return  # the latter: it has died with its server, and its pid may be another's by now
        for kill in (os.killpg, os.kill):  # it may have no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


class ForkServer:
    """`ready`: what `start` has learned of the functions."""

    def __init__(
        self, setup: protocol.WorkerSetup, quiet: bool = False, interpreter: Interpreter = OURS
    ) -> None:
        self.setup = setup
        self.ready = protocol.Ready("")
        self.process: subprocess.Popen | None = None
        format_ = msgspec.json if setup.program else msgspec.msgpack
        self.encode = format_.encode
        self.decode = format_.Decoder(protocol.FromWorker).decode
        self._label = ", ".join(spec.label for spec in setup.specs)
        self._quiet = quiet
        self._interpreter = interpreter
        self._control: socket.socket | None = None
        self._speaking = threading.Lock()  # one request at a time
        self._starting = asyncio.Lock()
        self._printer = threading.Thread()
        self._left_to_print = MAX_OUTPUT
        self._printed_last = ""

    async def start(self) -> None:
        """Raises LaminarError when it does not come up, or a function is missing or has other parameters."""
        await asyncio.to_thread(self._interpreter.check)
        if self.setup.program:
            self.setup.program[0] = self._interpreter.program
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(IMPORT_SECONDS)
        with theirs:
            kept = {spec.api_key_env for spec in self.setup.specs}
            words = ["server", str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                [*self._interpreter.command(), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=self._interpreter.environment(environment(kept)),
            )
        self._control = ours
        assert self.process.stdout is not None
        self._printer = threading.Thread(target=self._print, args=(self.process.stdout,), daemon=True)
        self._printer.start()
        try:
            ready = await asyncio.to_thread(self._request, self.setup)
        except TimeoutError:
            raise LaminarError(f"{self._label}: the import took longer than {IMPORT_SECONDS:g} s") from None
        except (OSError, EOFError):
            code = self.process.wait()
            raise LaminarError(
                f"{self._label}: the process ended with {code} during the import; see what it printed"
            ) from None
        assert isinstance(ready, protocol.Ready)
        if ready.error:
            raise LaminarError(ready.error)
        self.ready = ready

    def _request(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> msgspec.Struct:
        """Blocks. Raises TimeoutError, OSError or EOFError."""
        with self._speaking:
            control = self._control
            assert control is not None
            socket.send_fds(control, [encode(message)], fds)
            if not (packet := control.recv(_MAX_PACKET)):
                raise EOFError
        return protocol.decode_from_server(packet)

    async def fork(self, together: bool) -> Worker:
        """A worker that is ready. Raises LaminarError when none can be started any more."""
        for attempt in range(2):
            try:
                return await self._fork(together)
            except (OSError, EOFError, asyncio.IncompleteReadError) as error:
                if attempt:
                    raise LaminarError(
                        f"{self._label}: no worker process can be started ({type(error).__name__})"
                    ) from None
                await self._restart()
        raise AssertionError

    async def _fork(self, together: bool) -> Worker:
        ours, theirs = socket.socketpair()

        def forks() -> msgspec.Struct:
            with theirs:  # closed here only: a caller that gives up must not free a number that is being sent
                return self._request(protocol.Fork(together), (theirs.fileno(),))

        forking = asyncio.create_task(asyncio.to_thread(forks))
        writer: asyncio.StreamWriter | None = None
        try:
            forked = await asyncio.shield(forking)
            assert isinstance(forked, protocol.Forked)
            reader, writer = await asyncio.open_connection(sock=ours)
            await self._await_ready(reader, writer)
        except BaseException:
            (writer or ours).close()
            forking.add_done_callback(self._unwanted)
            raise
        return Worker(forked.pid, self, reader, writer)

    async def _await_ready(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What a new worker says first. Raises LaminarError for an error, or if a program does not start."""
        program = self.setup.program
        limit = START_SECONDS if program else IMPORT_SECONDS
        try:
            writer.write(framed(self.setup, self.encode))
            async with within(limit):
                ready = self.decode(await read_frame(reader))
        except (OSError, asyncio.IncompleteReadError) as error:
            if not program:
                raise
            reason = f"not ready after {limit:g} s"
            if not isinstance(error, TimeoutError):
                await self.stop()  # so that all that it has printed is here
                await asyncio.to_thread(self._printer.join, protocol.END_SECONDS)
                reason = f"{program[0]} ended: {self._printed_last or 'it said nothing'}"
            raise LaminarError(f"{self._label}: {reason}") from None
        if isinstance(ready, protocol.Ready) and ready.error:
            raise LaminarError(ready.error)

    def _unwanted(self, forking: asyncio.Task[msgspec.Struct]) -> None:
        """Nobody waits for this worker any more; its keeper would stay until the server ends."""
        if not forking.cancelled() and forking.exception() is None:
            forked = forking.result()
            assert isinstance(forked, protocol.Forked)
            forking.get_loop().run_in_executor(None, self._reap, forked.pid)

    async def _restart(self) -> None:
        """After the server has died, for want of memory for instance. Its workers have died with it."""
        async with self._starting:
            if self.process is None or self.process.poll() is not None:
                self._end()
                await self.start()

    async def reap(self, worker: Worker) -> None:
        """Ends a worker for good, and all that it has started."""
        worker.kill()
        await asyncio.to_thread(self._reap, worker.pid)

    def _reap(self, pid: int) -> None:
        with contextlib.suppress(OSError), self._speaking:
            if self._control is not None:
                self._control.send(encode(protocol.Reap(pid)))

    def _print(self, pipe: BinaryIO) -> None:
        """What users' code prints goes into our log, up to a bound. Ends when nobody can print any more."""
        with pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self._printed_last = " ".join(chunk.decode(errors="replace").split())[-_SHOWN:]
                kept = b"" if self._quiet else chunk[: self._left_to_print]
                self._left_to_print -= len(kept)
                if kept and self._left_to_print == 0:
                    bound = f"{MAX_OUTPUT >> 20} MiB"
                    kept += f"\n[reward functions have printed {bound}; the rest is dropped]\n".encode()
                print(kept.decode(errors="backslashreplace"), end="", file=sys.stderr, flush=True)

    def _end(self) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer is told
            self._control.close()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends programs gently
                self.process.wait(2 * protocol.END_SECONDS if self.setup.program else 0.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def stop(self) -> None:
        """Stops the server; its workers end with it."""
        await asyncio.to_thread(self._end)
