"""The client of a sandbox on this machine."""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.isolation.tiers import ISOLATION
from laminar_hpc.environments.sandbox.protocol import (
    Failed,
    Limits,
    Result,
    SandboxCall,
    SandboxSetup,
    decode_answer,
)
from laminar_hpc.environments.workers.framing import encode, framed, read_frame
from laminar_hpc.machine.files.folders import SANDBOX_FOLDER_PREFIX, claim
from laminar_hpc.machine.own_time import within

ZYGOTE = f"{__package__}.zygote"  # its module, which this one does not import
PRELOAD = ("numpy", "sympy")
QUEUE_SECONDS = 600.0  # longest wait for a place, the start of the preloaded process included
MAX_TIMEOUT_SECONDS = 3600.0
_LOOKS = 50  # for the end of a preloaded process that was killed
_RETRY_SECONDS = 0.01  # while the socket to the preloaded process is full


class SandboxFailed(LaminarError):
    """The sandbox could not run the code; the code has no part in it."""


class Sandbox:
    """Runs Python programs, each in a process of its own that is forked from a preloaded one.

    That one is started by `start`, or with the first call, and shared with all processes that are forked
    after that. `isolation`: the strongest tier of this machine (auto), or a tier of isolation/tiers.py; a
    call raises SandboxFailed where the machine does not have it. `preload`: modules imported beforehand.
    """

    def __init__(
        self, isolation: str = "auto", preload: Sequence[str] = PRELOAD, limits: Limits | None = None
    ) -> None:
        if isolation not in ISOLATION:
            raise ValueError(f"isolation={isolation!r}: must be one of {', '.join(ISOLATION)}")
        self._isolation = isolation
        self._preload = list(preload)
        self._limits = limits or Limits()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._owner = 0
        self._starting = threading.Lock()

    def start(self) -> None:
        """Starts the preloaded process and does not wait for it."""
        with self._starting:
            if self._control is None:
                self._start()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=SANDBOX_FOLDER_PREFIX)
        self._owner = os.getpid()
        claim(Path(self._folder))
        inside = os.path.join(self._folder, "inside")
        os.mkdir(inside)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", ZYGOTE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment(),
            )
        ours.setblocking(False)
        ours.send(encode(SandboxSetup(self._isolation, self._preload, inside, self._limits)))
        self._control = ours

    # ---- calls ---------------------------------------------------------------------------------------------

    async def run(self, code: str, stdin: str = "", timeout_seconds: float = 10.0) -> Result:
        """What comes of this program. Its time counts from its own start: calls beyond `limits.at_once` wait
        before. Raises SandboxFailed."""
        if not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise ValueError(
                f"timeout_seconds={timeout_seconds}: must be above 0, at most {MAX_TIMEOUT_SECONDS:g}"
            )
        for _ in range(2):
            reader, writer = await asyncio.open_connection(sock=await self._connected())
            try:
                writer.write(framed(SandboxCall(code, stdin, timeout_seconds)))
                async with within(QUEUE_SECONDS + timeout_seconds):
                    answer = decode_answer(await read_frame(reader))
            except TimeoutError:
                raise SandboxFailed(
                    f"no place in the sandbox within {QUEUE_SECONDS:g} s (calls of {timeout_seconds:g} s; "
                    f"{self._limits.at_once or 'as many as cores'} run at a time)"
                ) from None
            except (OSError, asyncio.IncompleteReadError):  # its keeper has gone, for want of memory likely
                await self._look_for_death()
                continue
            finally:
                writer.close()
            if isinstance(answer, Failed):
                raise SandboxFailed(answer.reason)
            return answer
        raise SandboxFailed("the process that ran the code was killed, twice; is there enough memory?")

    def run_sync(self, code: str, stdin: str = "", timeout_seconds: float = 10.0) -> Result:
        """Does what `run` does, for callers that do not await."""
        with ThreadPoolExecutor(1) as thread:  # the caller's own may have a loop that runs
            return thread.submit(asyncio.run, self.run(code, stdin, timeout_seconds)).result()

    async def _connected(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            while not self._sent(theirs):
                await asyncio.sleep(_RETRY_SECONDS)
        except BaseException:
            ours.close()
            raise
        return ours

    async def _look_for_death(self) -> None:
        """Forgets the preloaded process if it ends within half a second: until its last child has ended, too,
        its socket takes connections."""
        for _ in range(_LOOKS):
            with self._starting:
                if self._process is not None and self._process.poll() is not None:
                    return self._forget()
            await asyncio.sleep(_RETRY_SECONDS)
        return None

    def _sent(self, theirs: socket.socket) -> bool:
        """Whether the preloaded process will have this end of a connection; False: not yet, ask again. Starts
        the process, and starts it again where it has died."""
        for again in (True, False):
            self.start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                    return False
                if not again:
                    theirs.close()
                    raise SandboxFailed("the sandbox's process ends at its start; see the log") from None
                self._forget()
            else:
                theirs.close()
                return True
        raise AssertionError

    # ---- its end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the preloaded process and all calls, if this process started it. Another call starts one."""
        with self._starting:
            self._forget()

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()  # its keepers hear of it, and end their calls
            self._process.wait()
            _remove(self._folder)
        self._process = None

    def __enter__(self) -> "Sandbox":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment() -> dict[str, str]:
    """All that sandboxed code finds there, but for HOME, TMPDIR and PWD, which are its box."""
    one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # -I ignores it; for programs that the code starts
        **one_thread,
    }


def _remove(folder: str) -> None:
    """The boxes of calls that are just being ended may change under it."""
    deadline = time.monotonic() + 2.0
    while os.path.isdir(folder) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
