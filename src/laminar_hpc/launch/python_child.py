"""A `laminar train` that a Python process has started: its life, and what it prints.

`python -m laminar_hpc.launch.python_child PID WORD ...` is what runs: the command, which is told to stop in
order when the process PID is gone. Linux tells a child of the end of the thread that has started it, which
may be long before that.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.line.agent_line import REFUSED

_LINES = 10_000
_LAST_LINES_SECONDS = 2.0  # something that the run has left behind may hold its output open
_ERROR = "laminar: error: "


class TrainProcess:
    def __init__(self, words: Sequence[str]) -> None:
        """Raises LaminarError where no process can be started."""
        self._lines: deque[str] = deque(maxlen=_LINES)
        command = [sys.executable, "-u", "-m", "laminar_hpc.launch.python_child", str(os.getpid()), *words]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # an interrupted cell is not the run's
            )
        except OSError as error:
            raise LaminarError(f"no process can be started ({error.strerror})") from None
        self._reader = threading.Thread(target=self._read, name="laminar-train", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(_LAST_LINES_SECONDS)
        return code

    @property
    def output(self) -> str:
        return "\n".join(list(self._lines))

    def stop(self) -> None:
        """As Ctrl-C in its terminal: the step is finished and a checkpoint written. A process that has ended
        is left alone."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)

    def raise_if_failed(self) -> None:
        """Raises LaminarError with what the command has said of its failure."""
        if not self.code:
            return
        said = [line.removeprefix(_ERROR) for line in list(self._lines) if line.startswith(_ERROR)]
        if self.code == REFUSED and said:
            raise Refused(said)
        last = next(reversed(self._lines), "nothing")
        raise LaminarError("; ".join(said) or f"laminar train ended with exit code {self.code}: {last}")


def _stop_without(parent: int) -> None:
    """Stops this process when the other one has ended."""
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def main(parent: str, words: list[str]) -> None:
    try:
        descriptor = os.pidfd_open(int(parent))
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != int(parent):  # it was gone before
        sys.exit(1)
    threading.Thread(target=_stop_without, args=[descriptor], daemon=True).start()
    from laminar_hpc.launch.cli import main as command

    sys.argv = ["laminar", "train", *words]
    command()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
