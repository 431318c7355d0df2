"""The interpreter that runs verifiers (bridge.py), with its keeper: started, spoken with, and ended."""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from laminar_hpc.cluster.own_time import within
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.workers.fork_server import MAX_OUTPUT, environment
from laminar_hpc.environments.workers.interpreter import Interpreter
from laminar_hpc.verifiers.bridge import LONGEST

START_SECONDS = 120.0  # for its imports and its server's
_PRINT_SECONDS = 5.0  # for what an interpreter that has ended still said
_SHOWN = 200  # characters
_BRIDGE = Path(__file__).with_name("bridge.py")
_NOT_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # our packages are not the interpreter's


class Lost(Exception):
    """The process has ended."""


class Answer(msgspec.Struct):
    """See bridge.py."""

    id: int = 0
    error: str = ""
    reward: float | None = None
    parts: dict[str, float] = {}
    rows: int = 0


_decode = msgspec.json.Decoder(Answer).decode
_encode = msgspec.json.Encoder().encode


def block(config: EnvironmentConfig) -> dict:
    """What the user says, as verifiers has it: its [env] block."""
    return {"taskset": {"id": config.verifiers}} if isinstance(config.verifiers, str) else config.verifiers


def name(config: EnvironmentConfig) -> str:
    """What errors call it."""
    return f"environment.verifiers={block(config)['taskset']['id']}"


class Process:
    """`start`, `ask`, `stop`. `serve`: episodes are played; else it is there for its tasks. `quiet`: what it
    prints is dropped."""

    def __init__(self, config: EnvironmentConfig, serve: bool = True, quiet: bool = False) -> None:
        self._config, self._serve, self._left = config, serve, 0 if quiet else MAX_OUTPUT
        self._ids, self._waiting = itertools.count(1), dict[int, asyncio.Future[Answer]]()
        self._keeper: subprocess.Popen | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._printer, self._last = threading.Thread(), ""  # what it has printed last

    @property
    def lives(self) -> bool:
        """It can be asked."""
        return self._listener is not None and not self._listener.done()

    async def start(self) -> None:
        """Raises LaminarError."""
        label = name(self._config)
        python = Path(Interpreter("environment.python", self._config.python).program)
        ours, theirs = socket.socketpair()
        with theirs:
            self._spawn(python, theirs.fileno())
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LONGEST)
        first = {"environment": block(self._config), "max_turns": self._config.max_turns}
        self._writer.write(_encode(first | {"serve": self._serve}) + b"\n")
        try:
            async with within(START_SECONDS):
                line = await reader.readline()
            error = _decode(line).error if line else "ended"
        except ConnectionError:
            error = "ended"
        except TimeoutError:
            error = f"not ready after {START_SECONDS:g} s"
        if error:
            await self.stop()
            if error == "ended":
                await asyncio.to_thread(self._printer.join, _PRINT_SECONDS)
                error = f"{python} ended: {self._last or 'it said nothing'}"
            raise LaminarError(f"{label}: {error}")
        self._listener = asyncio.create_task(self._listen(reader))

    def _spawn(self, python: Path, fd: int) -> None:
        words = [str(os.getpid()), str(fd), str(python), "-P", str(_BRIDGE)]
        own = {name: value for name, value in environment().items() if name not in _NOT_OURS}
        own["PATH"] = f"{python.parent}:{own.get('PATH', os.defpath)}"  # its uv
        for proxy in ("no_proxy", "NO_PROXY"):
            own[proxy] = ",".join(filter(None, (own.get(proxy), "127.0.0.1")))
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "laminar_hpc.verifiers.keeper", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(fd,),
            start_new_session=True,
            env=own,
        )
        assert self._keeper.stdout is not None
        self._printer = threading.Thread(target=self._print, args=(self._keeper.stdout,), daemon=True)
        self._printer.start()

    async def ask(self, **message: object) -> Answer:
        """Raises Lost. Who gives up waiting ends the episode."""
        if not self.lives:
            raise Lost
        assert self._writer is not None
        number = next(self._ids)
        self._waiting[number] = waiter = asyncio.get_running_loop().create_future()
        self._writer.write(_encode({"id": number, **message}) + b"\n")
        try:
            return await waiter
        except asyncio.CancelledError:
            if self.lives:
                self._writer.write(_encode({"id": 0, "cancel": number}) + b"\n")
            raise
        finally:
            del self._waiting[number]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                answer = _decode(line)
                waiter = self._waiting.get(answer.id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(answer)
        except (OSError, ValueError):  # the latter: a line that is too long, or no answer
            pass
        finally:
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(Lost())

    def _print(self, pipe: BinaryIO) -> None:
        """What it prints goes into our log, up to a bound."""
        with pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self._last = " ".join(chunk.decode(errors="replace").split())[-_SHOWN:]
                kept, self._left = chunk[: self._left], max(0, self._left - len(chunk))
                print(kept.decode(errors="backslashreplace"), end="", file=sys.stderr, flush=True)

    async def stop(self) -> None:
        """All that it has started ends with it."""
        if self._listener is not None:
            self._listener.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._keeper is not None:
            self._keeper.terminate()
            await asyncio.to_thread(self._keeper.wait)


async def check(config: EnvironmentConfig) -> None:
    """Loads the environment, and no more. Raises LaminarError where it cannot be used."""
    process = Process(config, serve=False, quiet=True)
    await process.start()
    await process.stop()
