"""A `laminar train` that a Python process has started: its life, and what it prints.

The process is started and heard by a thread that lives as long as it does, because Linux tells a child of the
end of the thread that has started it. `python -m laminar_hpc.launch.python_child PID WORD ...` is what runs:
the command, which is told to stop in order when the process PID is gone.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.line.agent_line import REFUSED
from laminar_hpc.machine.processes import die_with_parent

_LINES = 10_000
_LAST_LINES_SECONDS = 2.0  # something that the run has left behind may hold its output open
_ERROR = "laminar: error: "


class TrainProcess:
    """`code`: its exit code, None while it runs."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises LaminarError where no process can be started."""
        self.code: int | None = None
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._fault: OSError | None = None
        self._process: subprocess.Popen[str] | None = None
        self._begun = threading.Event()
        threading.Thread(target=self._live, args=[words], name="laminar-train", daemon=True).start()
        self._begun.wait()
        if self._fault is not None:
            raise LaminarError(f"no process can be started ({self._fault.strerror})")

    def _live(self, words: Sequence[str]) -> None:
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
            self._fault = error
            return
        finally:
            self._begun.set()
        reader = threading.Thread(target=self._read, args=[self._process], daemon=True)
        reader.start()
        code = self._process.wait()
        reader.join(_LAST_LINES_SECONDS)
        self.code = code

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        """The lines so far."""
        return "\n".join(list(self._lines))

    def stop(self) -> None:
        """As Ctrl-C in its terminal: the step is finished and a checkpoint written. A process that has ended
        is left alone."""
        if self._process is not None and self.code is None:
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


def main(parent: str, words: list[str]) -> None:
    """Runs `laminar train` in this process."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before
        sys.exit(1)
    from laminar_hpc.launch.cli import main as command

    sys.argv = ["laminar", "train", *words]
    command()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
