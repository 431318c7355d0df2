"""The user's own program that starts and ends replicas, `cluster.scale_command`, and its calls:

    PROGRAM list       prints who is to come of those that it has started (listed_replicas.py), or nothing
    PROGRAM start N    starts N more replicas somewhere, and returns
    PROGRAM stop ID    the replica of this ID has left, or is not wanted: lets go of what it stands on

N is a number, ID what Hello.starter_id says. Each start is preceded by a list, and asks only for replicas
that are not on their way already. At the run's end those on their way are listed and stopped. There is one
call at a time, no start or stop sooner than CALL_SECONDS after the one before; after a failure the next one
waits for twice as long, at most PAUSE_SECONDS_MAX.
"""

import logging
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.controller.fleet.listed_replicas import ListedReplicas, StillToCome
from laminar_hpc.line.agent_line import VARIABLE
from laminar_hpc.machine.processes import die_with_parent

log = logging.getLogger(__name__)
CALL_SECONDS, PAUSE_SECONDS_MAX = 10.0, 600.0
LIMIT_SECONDS = 300.0  # for one call
CLOSE_SECONDS = 30.0  # for all calls at the end of the run
STOP_TRIES = 3
_LOOK_SECONDS = 0.05  # at the end of the run
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class FailedCall:
    """`started`: how many replicas it was to start, 0 of a stop; `final`: it is not tried again by itself."""

    text: str
    started: int = 0
    final: bool = True


@dataclass(frozen=True)
class OnTheirWay:
    """Fewer were started than were asked for, as some are to come already."""

    text: str


@dataclass
class _ProgramCall:
    action: str  # "start", "stop", or "withdraw": stop all who are on their way
    argument: str = ""
    failed: int = 0  # times
    is_listed: bool = False  # the program has said who is on their way

    @property
    def words(self) -> list[str]:
        listed = self.action == "stop" or self.is_listed
        return [self.action, self.argument] if listed else ["list"]


class CommandStarter:
    """Runs the program, each call in a process group of its own that ends with this process. What it prints
    goes to logs/scale.log, but for lists. `limit`: seconds for a replica that has a machine to join."""

    def __init__(self, command: str, run_dir: Path, limit: float) -> None:
        self.here: Callable[[], Collection[str]] = frozenset
        self._words = shlex.split(command)
        self._log = run_dir / "logs" / "scale.log"
        self._environment = _environment(run_dir)
        self._listed = ListedReplicas(limit)
        self._calls = deque[_ProgramCall]()  # the first one may be under way
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (of a list; closed with this object)
        self._limit = self._not_before = 0.0
        self._pause = CALL_SECONDS
        self._begin = 0  # of what the call writes into the log

    def start(self, count: int) -> None:
        self._calls.append(_ProgramCall("start", str(count)))

    def stop(self, starter_id: str) -> None:
        self._calls.append(_ProgramCall("stop", starter_id))

    def look(self) -> list[FailedCall | OnTheirWay]:
        now = time.monotonic()
        if self._process is None:
            return self._begin_call(now) if self._calls and now >= self._not_before else []
        if (code := self._process.poll()) is None and now < self._limit:
            return []
        why = f"has ended with exit code {code}"
        if code is None:
            self._kill()
            why = f"has not returned within {LIMIT_SECONDS:.0f} s"
        self._process = None
        return self._failed(why + self._last_line()) if code != 0 else self._done()

    def close(self, is_final: bool) -> None:
        """`is_final`: nobody goes on with the run, so that whoever is on their way is stopped."""
        if is_final:
            under_way = [] if self._process is None else [self._calls[0]]
            for call in under_way:
                call.argument = "0" if call.words == ["list"] else call.argument  # nothing is started now
            stops = [call for call in self._calls if call.action == "stop" and call not in under_way]
            self._calls = deque([*under_way, *stops, _ProgramCall("withdraw")])
            until = time.monotonic() + CLOSE_SECONDS
            while self._calls and time.monotonic() < until:
                self._not_before = 0.0
                for said in self.look():
                    log.warning("%s", said.text)
                time.sleep(_LOOK_SECONDS)
        if self._process is not None:
            self._kill()
        self._printed.close()

    # ---- one call ------------------------------------------------------------------------------------------

    def _begin_call(self, now: float) -> list[FailedCall | OnTheirWay]:
        words = self._calls[0].words
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._printed.seek(0)
            self._printed.truncate()
            with open(self._log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                self._begin = file.tell()
                self._process = subprocess.Popen(
                    [*self._words, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=self._printed if words == ["list"] else file,
                    stderr=file,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            return self._failed(f"cannot be run: {error.strerror}")
        self._limit = now + LIMIT_SECONDS
        return []

    def _done(self) -> list[FailedCall | OnTheirWay]:
        """The first call has returned in order."""
        call = self._calls[0]
        if call.words == ["list"]:
            self._printed.seek(0)
            printed = self._printed.read().decode(errors="replace")
            stopping = [call.argument for call in self._calls if call.action == "stop"]
            try:
                found = self._listed.judge(printed, {*self.here(), *stopping}, time.monotonic())
            except LaminarError as error:
                return self._failed(str(error))
            return self._heard(call, found)
        self._calls.popleft()
        self._pause = CALL_SECONDS
        self._not_before = time.monotonic() + self._pause
        return []

    def _heard(self, call: _ProgramCall, found: StillToCome) -> list[FailedCall | OnTheirWay]:
        """Who is on their way, before a start or at the end."""
        call.is_listed = True
        for starter_id in found.late + (found.coming if call.action == "withdraw" else []):
            self.stop(starter_id)
        wanted = 0 if call.action == "withdraw" else int(call.argument)
        missing = max(0, wanted - len(found.coming))
        call.argument = str(missing)
        if not missing:
            self._calls.popleft()
        if missing == wanted:
            return []
        waits = f", {len(found.waiting)} of them waiting for a machine" if found.waiting else ""
        return [OnTheirWay(f"{len(found.coming)} are on their way{waits}: {missing or 'none'} started")]

    def _failed(self, why: str) -> list[FailedCall | OnTheirWay]:
        call = self._calls.popleft()
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
        self._not_before = time.monotonic() + self._pause
        text = f"cluster.scale_command {' '.join(call.words)} {why}"
        if call.action == "start":
            return [FailedCall(text, int(call.argument))]
        call.failed += 1
        if call.failed < STOP_TRIES:
            self._calls.append(call)
        return [FailedCall(text, final=call.failed == STOP_TRIES)]

    def _last_line(self) -> str:
        with suppress(OSError), open(self._log, "rb") as file:
            file.seek(max(self._begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
            return f": {lines[-1].strip()}" if lines else "; it has said nothing"
        return ""

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _environment(run_dir: Path) -> dict[str, str]:
    """Without what a Slurm job and an agent have told this process: another job would take it for its own."""
    foreign = {name for name in os.environ if name.startswith("SLURM_")} - {"SLURM_CONF"} | {VARIABLE}
    own = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**own, "RUN_DIR": str(run_dir.absolute())}
