"""Who starts replicas for the run, and ends what they stood on: the agent of this process (`laminar train`),
or a program of the user's own, `cluster.scale_command`:

    PROGRAM start N    starts N more replicas somewhere, and returns
    PROGRAM stop ID    the replica of this ID has left: lets go of what it stood on

N is a number, ID what Hello.starter_id says. There is one call at a time, none sooner than CALL_SECONDS after
the one before; after a failure the next one waits for twice as long, at most PAUSE_SECONDS_MAX.
"""

import os
import shlex
import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.agent_line import RankReport, orders, report
from laminar_hpc.machine.processes import die_with_parent

CALL_SECONDS, PAUSE_SECONDS_MAX = 10.0, 600.0
LIMIT_SECONDS = 300.0  # for one call
STOP_TRIES = 3
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class FailedCall:
    """`started`: how many replicas it was to start, 0 of a stop; `final`: it is not tried again by itself."""

    text: str
    started: int = 0
    final: bool = True


class ReplicaStarter(Protocol):
    """Neither call waits; what became of it `look` says, called each turn."""

    def start(self, count: int) -> None: ...

    def stop(self, starter_id: str) -> None: ...

    def look(self) -> list[FailedCall]: ...

    def close(self) -> None: ...


def starter_of(config: RunConfig) -> ReplicaStarter:
    """Raises LaminarError where nobody starts replicas for this controller."""
    if config.role == "all":
        raise LaminarError(
            f"rollout.replicas={config.rollout.replicas}: ranks of one world begin and end together; start "
            "it with laminar train, laminar submit --apart or the scripts of launch/"
        )
    if config.cluster.scale_command:
        return CommandStarter(config.cluster.scale_command, Path(config.run_dir))
    if not orders().starts_replicas:
        raise LaminarError(
            f"rollout.replicas={config.rollout.replicas}: nobody starts replicas here; name a program that "
            "does, cluster.scale_command=PROGRAM (docs/running.md), or write a number"
        )
    return AgentStarter()


class AgentStarter:
    """The agent that has forked this process starts them beside it. A replica that leaves frees its place."""

    def start(self, count: int) -> None:
        report(RankReport(start=count))

    def stop(self, starter_id: str) -> None:
        """Its agent has seen it leave."""

    def look(self) -> list[FailedCall]:
        return []

    def close(self) -> None:
        """The agent ends those that it has started."""


class CommandStarter:
    """Runs the program, each call in a process group of its own that ends with this process. What it prints
    goes to logs/scale.log."""

    def __init__(self, command: str, run_dir: Path) -> None:
        self._words = shlex.split(command)
        self._log = run_dir / "logs" / "scale.log"
        self._environment = {**os.environ, "RUN_DIR": str(run_dir.absolute())}
        self._calls: deque[tuple[str, str, int]] = deque()  # and how often it has failed
        self._process: subprocess.Popen[bytes] | None = None
        self._limit = self._not_before = 0.0
        self._pause = CALL_SECONDS
        self._begin = 0  # of what the call prints

    def start(self, count: int) -> None:
        self._calls.append(("start", str(count), 0))

    def stop(self, starter_id: str) -> None:
        self._calls.append(("stop", starter_id, 0))

    def look(self) -> list[FailedCall]:
        now = time.monotonic()
        if self._process is None:
            return self._call(now) if self._calls and now >= self._not_before else []
        if (code := self._process.poll()) is None and now < self._limit:
            return []
        why = f"has ended with exit code {code}"
        if code is None:
            self._kill()
            why = f"has not returned within {LIMIT_SECONDS:.0f} s"
        self._process = None
        return self._ended("" if code == 0 else why + self._last_line())

    def close(self) -> None:
        if self._process is not None:
            self._kill()

    def _call(self, now: float) -> list[FailedCall]:
        action, argument, _ = self._calls[0]
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                self._begin = os.fstat(log).st_size
                self._process = subprocess.Popen(
                    [*self._words, action, argument],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            finally:
                os.close(log)
        except OSError as error:
            return self._ended(f"cannot be run: {error.strerror}")
        self._limit = now + LIMIT_SECONDS
        return []

    def _ended(self, why: str) -> list[FailedCall]:
        action, argument, failed = self._calls.popleft()
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX) if why else CALL_SECONDS
        self._not_before = time.monotonic() + self._pause
        if not why:
            return []
        text = f"{shlex.join([*self._words, action, argument])} {why}"
        if action == "start":
            return [FailedCall(text, int(argument))]
        if failed + 1 < STOP_TRIES:
            self._calls.append((action, argument, failed + 1))
        return [FailedCall(text, final=failed + 1 == STOP_TRIES)]

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
