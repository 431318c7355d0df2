"""What a process prints, to a terminal, a pipe or a log: it ends nobody and delays nobody.

`guard` puts a Stream in place of sys.stdout and sys.stderr, so that this also holds for what libraries
print. A line that cannot be shown (its reader has gone, the disk is full, the terminal is stopped) is
appended to the file that `keep_in` names. Control characters are shown as escapes: text of models, rows,
rewards, tools and file names cannot steer a terminal.
"""

import atexit
import io
import os
import queue
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

LOG = "console.log"  # in the logs of a run: what its consoles did not take
_PATIENCE_SECONDS = 0.2  # for a line to be taken; then the stream is stuck, and no line is waited for
_END_SECONDS = 1.0  # for a stream that is stuck when the process ends
_LINES = 10_000  # that wait for a stuck stream, or for the folder of the log
_CONTROL = [*range(9), *range(11, 32), *range(127, 160)]
_ORDER = [0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]  # they move the text around them
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in [*_CONTROL, *_ORDER]}
_streams: "WeakSet[ConsoleStream]" = WeakSet()
_unshown: deque[bytes] = deque(maxlen=_LINES)
_log: Path | None = None


def printable(text: str) -> str:
    """`text` with escapes in place of what a terminal obeys; newlines and tabs stay."""
    return text.translate(_ESCAPES)


def guard(lossless: bool = False) -> None:
    """Gives this process its streams, unless another has taken them over. `lossless`: for a command whose
    reader may take its time; once that has gone, BrokenPipeError says so."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        given, now = getattr(sys, f"__{name}__"), getattr(sys, name)
        if given is None:  # the process was started without it; no file of ours may take its place
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if now is given or isinstance(now, ConsoleStream):
            setattr(sys, name, ConsoleStream(number, lossless))


def keep_in(run_dir: Path) -> None:
    """From now on lines that are not shown go to this run's logs, as soon as there are any."""
    global _log
    _log = run_dir / "logs" / LOG


def drain() -> None:
    """Gives what is not shown yet a last chance, before the process ends."""
    for stream in list(_streams):
        stream.flush()
        stream.newest.wait(_END_SECONDS)


atexit.register(drain)


class ConsoleStream(io.TextIOBase):
    """Shows lines through a thread. `write` and `flush` raise nothing, and wait _PATIENCE_SECONDS at most."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, descriptor: int, lossless: bool = False) -> None:
        self._descriptor = descriptor
        self._lossless = lossless
        self._part = ""
        self._process = 0
        self._is_stuck = False
        self._lines: queue.SimpleQueue[tuple[bytes, threading.Event]] = queue.SimpleQueue()  # signal-safe
        self.newest = threading.Event()
        self.newest.set()
        _streams.add(self)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        back = "\r" if text.startswith("\r") else ""  # of a progress bar
        whole, newline, self._part = (self._part + back + printable(text.removeprefix(back))).rpartition("\n")
        self._show(whole + newline)
        return len(text)

    def flush(self) -> None:
        part = self._part
        self._part = ""
        self._show(part)

    def _show(self, text: str) -> None:
        data = text.encode(self.encoding, self.errors)
        if self._lossless:
            return self._write(data)
        if not data:
            return None
        if self._process != os.getpid():  # the first line, also of a process that was forked
            self._process = os.getpid()
            self._lines = queue.SimpleQueue()
            threading.Thread(target=self._run, name="output", daemon=True).start()
        taken = threading.Event()
        if self._lines.qsize() < _LINES:
            self.newest = taken
            self._lines.put((data, taken))
        if not taken.wait(0 if self._is_stuck else _PATIENCE_SECONDS):
            self._is_stuck = True
            _keep(data)
        return None

    def _run(self) -> None:
        while True:
            data, taken = self._lines.get()
            try:
                self._write(data)
            except OSError:
                _keep(data)
            self._is_stuck = False
            taken.set()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]


def _keep(data: bytes) -> None:
    _unshown.append(data)
    if _log is not None:
        with suppress(OSError, IndexError), open(_log, "ab", buffering=0) as log:
            while True:
                log.write(_unshown.popleft())
