"""A machine of `laminar launch` that shares no folder with the run: it adds its replicas by `laminar join`.

    launcher                                    machine
    ssh ... laminar join --key -            ->  waits for a key
    RUN_DIR/join.key, once the run has one  ->  a line of its standard input, then it joins as ever
    stop, leave, over                       ->  lines behind it

So the key crosses inside ssh alone: in no command line, no variable, no file of that machine but its own.
"""

import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch.ssh.host import Orders
from laminar_hpc.line.join_key import JOIN_FILE, JoinKey
from laminar_hpc.machine.observability import console

OVER = "over"  # the run: who has not joined it yet ends, the others leave by themselves
_WORDS = ("stop", "leave", OVER)
_LOOK_SECONDS = 0.1


def join_line(binaries: Path, variables: Sequence[str], replicas: int, tied: bool) -> str:
    """What ssh starts there: laminar of the same path, else that of the machine's PATH; in the folder where
    `laminar launch` was typed if there is one, else in the user's own."""
    folder = shlex.quote(os.getcwd())
    words = ["laminar", "join", "--key", "-", f"--replicas={replicas}", *["--tied"][: int(tied)]]
    path = f'PATH={shlex.quote(str(binaries))}:"$PATH"'
    return f"test -d {folder} && cd {folder}; exec env {shlex.join(variables)} {path} {shlex.join(words)}"


class RunKey:
    """RUN_DIR/join.key, as this machine sees it. `is_made_anew`: by a controller that is started now, so that
    one that lies there is an earlier one's. Raises LaminarError where none will come."""

    def __init__(self, run_dir: Path, is_made_anew: bool) -> None:
        self._path = run_dir / JOIN_FILE
        self._before = self._written() if is_made_anew else None
        if not is_made_anew and self._written() is None:
            raise LaminarError(
                f"{self._path} is missing: the run has ended, or does not use cluster.storage=stream"
            )

    def line(self) -> str:
        """The key; "" until it is there."""
        if self._written() in (None, self._before):
            return ""
        with suppress(OSError):
            return self._path.read_text().strip()
        return ""

    def _written(self) -> tuple[int, int] | None:
        """Which file it is: each controller puts a new one in its place."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


class JoinInput(Orders):
    """The machine's end: the standard input of `laminar join --key -`. An order, a signal or the end of the
    input before the key has come raise KeyboardInterrupt in the main thread until `begin`; from then on they
    are for the agent (`obey`)."""

    def __init__(self, tied: bool) -> None:
        self._key = ""
        self._is_tied_later = tied
        self._interrupts = True
        print(console.line("machine", f"{socket.gethostname()}  waits for the run's key"), flush=True)
        super().__init__(tied=True)

    def key(self) -> JoinKey:
        """Waits for it as long as the launcher does. Raises LaminarError for what is none."""
        while not self._key:
            time.sleep(_LOOK_SECONDS)
        try:
            return msgspec.json.decode(self._key, type=JoinKey)
        except msgspec.DecodeError as error:
            raise LaminarError(f"the standard input is not a run's key ({error})") from None

    def begin(self) -> None:
        self._interrupts = False

    def _take(self, order: str | int) -> None:
        if isinstance(order, str) and order not in _WORDS:
            self._key = self._key or order
            self._tied = self._is_tied_later
            return
        super()._take(order)
        if not self._interrupts:
            return
        if threading.current_thread() is threading.main_thread():
            self._interrupts = False  # once
            raise KeyboardInterrupt
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
