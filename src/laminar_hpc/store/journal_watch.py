"""Says when the file system of the journal is slow or does not answer, as the controller's turn waits for it.

In a thread of its own: the one that writes may be held by the file system for as long as that likes.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from laminar_hpc.machine.observability import console

_STUCK_SECONDS = 10.0  # a write that takes longer is reported while it waits
_SLOW_SECONDS = 0.1  # the moving average of writes: the turn of a controller that is busy takes less
_SMOOTHING = 0.02  # about the last fifty
_LOOK_SECONDS = 1.0


class JournalWatch:
    """A context around each write. Each kind of trouble is said once, a wait whenever there is one."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._since: float | None = None
        self._stuck = self._slow_said = False
        self._average = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="journal watch", daemon=True).start()

    def __enter__(self) -> None:
        self._stuck = False
        self._since = time.monotonic()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._since is not None
        seconds = time.monotonic() - self._since
        self._since = None
        if self._stuck:
            self._warn(f"answers again after {seconds:.0f} s")
        self._average += _SMOOTHING * (seconds - self._average)
        if self._average > _SLOW_SECONDS and not self._slow_said:
            self._slow_said = True
            text = "for each transaction, and every turn of the controller waits for one"
            self._warn(f"takes {self._average:.2f} s {text}")

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            since = self._since
            if since is not None and not self._stuck and time.monotonic() - since > _STUCK_SECONDS:
                self._stuck = True
                text = "the controller waits until its file system does"
                self._warn(f"has not answered for {_STUCK_SECONDS:.0f} s: {text}")

    def _warn(self, text: str) -> None:
        self._say(console.line("warning", f"the journal {self._folder} {text}"))

    def close(self) -> None:
        self._closed.set()
