"""The launcher's side of a run without Slurm: an ssh connection to each machine, what comes over it, and who
is told what when one of them ends.

    what ends                                  then
    controller, in order                       the others end by themselves
    controller, failed or refused              the others are told to leave
    trainers, failed for good                  the run is told to stop: a checkpoint, then all end
    relays and replicas, failed for good       the run goes on
    a connection                               the run goes on, as far as it can without that machine
    any, before all have begun                 all are told to leave
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from laminar_hpc.launch.launch import REPEAT_SECONDS
from laminar_hpc.launch.ssh.hosts import HostPart
from laminar_hpc.launch.ssh.joining import OVER
from laminar_hpc.line.agent_line import REFUSED
from laminar_hpc.machine.processes import die_with_parent

_LOOK_SECONDS = 0.1
_END_SECONDS = 60.0  # for the others behind the controller
_LOST = 255  # ssh's exit code for an error of its own
_NO_PYTHON = (126, 127)  # a shell's, for a command that is not there


class Connection:
    """One machine: `command` is its ssh. Lines that come are given to `say`."""

    def __init__(
        self, part: HostPart, command: Sequence[str], say: Callable[["Connection", str], None]
    ) -> None:
        self.part = part
        self.begun = False
        self.has_key = not part.joins
        self._say = say
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the launcher
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.begun = self.begun or line.startswith("machine ")
            self._say(self, line.rstrip("\n"))

    def order(self, word: str) -> None:
        """`stop`, `leave` or another line, to what runs there."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()

    def code(self) -> int | None:
        """The exit code of what ran there, 255 where the connection was lost; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(1)
        return code

    def close(self) -> None:
        """Ends ssh, and leaves what runs there alone."""
        self._process.kill()


class Launcher:
    """All connections of one `laminar launch`, until all have ended."""

    def __init__(
        self,
        commands: Sequence[tuple[HostPart, Sequence[str]]],
        clock: Callable[[], float] = time.monotonic,
        key: Callable[[], str] = str,
    ) -> None:
        """`key`: the run's join key, a line for machines that see no folder of it; "" until it is there."""
        self._commands = commands
        self._clock = clock
        self._key = key
        self._codes = dict[Connection, int]()
        self._signals = 0
        self._asked = 0.0
        self._gave_up = False
        self._leave_at: float | None = None  # when those that are left are told to leave
        self._lock = threading.RLock()  # a signal may come between two lines
        self._connections: list[Connection] = []

    @property
    def begun(self) -> bool:
        """Whether each machine has said that its part begins."""
        begun = [each for each in self._connections if each.begun]
        return len(begun) == len(self._commands)

    def run(self) -> int:
        """Exit code: 0 = done or stopped in order, 2 = refused by a machine, 1 = all or a part has failed."""
        for part, command in self._commands:
            self._connections.append(Connection(part, command, self._say))
        if self._signals:  # it came meanwhile
            self._order("leave", self._connections)
        while len(self._codes) < len(self._connections) and not self._gave_up:
            for connection in self._going_on():
                if (code := connection.code()) is not None:
                    self._codes[connection] = code
                    self._ended(connection, code)
            self._give_key()
            if self._leave_at is not None and self._clock() > self._leave_at:
                self._leave_at = None
                self._order("leave", self._going_on())
            time.sleep(_LOOK_SECONDS)
        for connection in self._going_on():
            connection.close()
        codes = list(self._codes.values())
        return REFUSED if REFUSED in codes else int(any(codes) or self._gave_up)

    def on_signal(self, number: int) -> None:
        """The first is a stop in order; the second lets all processes leave; the third ends the launcher."""
        if self._signals and self._clock() - self._asked < REPEAT_SECONDS:
            return  # `timeout` and some terminals deliver one wish twice
        self._signals, self._asked = self._signals + 1, self._clock()
        name = signal.Signals(number).name
        if self._signals == 1:
            controllers = [each for each in self._going_on() if each.part.controller]
            self._order("stop", controllers or self._going_on())
            self._tell(f"{name}: a checkpoint, then all processes end; once more ends them at once")
        elif self._signals == 2:
            self._order("leave", self._going_on())
            self._tell(f"{name}: all processes are told to end; once more leaves them alone")
        else:
            self._gave_up = True

    def _give_key(self) -> None:
        waiting = [each for each in self._going_on() if not each.has_key]
        if waiting and (key := self._key()):
            self._order(key, waiting)
            for each in waiting:
                each.has_key = True

    def _going_on(self) -> list[Connection]:
        return [each for each in self._connections if each not in self._codes]

    @staticmethod
    def _order(word: str, connections: Sequence[Connection]) -> None:
        for connection in connections:
            connection.order(word)

    def _ended(self, connection: Connection, code: int) -> None:
        part, others = connection.part, self._going_on()
        if code == _LOST:
            self._lost(connection)
        if code in _NO_PYTHON and not connection.begun:
            lacks, more = "Python", ""
            if part.joins:
                lacks, more = "laminar", ", or install it there on the PATH of the shell"
            self._tell(
                f"error: {part.host.name} has no {lacks} where this machine has it: VENV= names another{more}"
            )
        if code and (code == REFUSED or not self.begun):
            self._order("leave", others)
        elif part.controller and code != _LOST:
            self._leave_at = self._clock() + (0.0 if code else _END_SECONDS)
            self._order(OVER, [each for each in others if each.part.joins])
        elif code not in (0, _LOST) and part.trainers:
            self._order("stop", [each for each in others if each.part.controller])

    def _lost(self, connection: Connection) -> None:
        part = connection.part
        if not connection.begun:
            self._tell(f"error: {part.host.name}: ssh could not start its part; all others are told to leave")
            return
        if part.controller:
            rest = "the others wait for its controller"
        elif part.trainers:
            rest = "the others wait for its trainers"
        else:
            rest = "the run goes on without its replicas"
        self._tell(
            f"error: {part.host.name} is gone, or the connection to it: {rest} "
            "(cluster.join_timeout_seconds); if the machine is there its part goes on, else start it again: "
            f"the same command with --only {part.host.name}"
        )

    def _say(self, connection: Connection, line: str) -> None:
        """The controller's lines as they are, those of others with the machine's name."""
        name = "" if connection.part.controller else f"{connection.part.host.name}: "
        with self._lock:
            stream = sys.stderr if line.startswith("laminar: ") else sys.stdout
            print(f"{name}{line}", file=stream, flush=True)

    def _tell(self, text: str) -> None:
        with self._lock:
            print(f"laminar: {text}", file=sys.stderr, flush=True)
