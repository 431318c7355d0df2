"""Logs and traces of machines that have joined the run and share no folder with it. Both are files of theirs:

    trace   a rollout there sends what its own and its relay's have grown by: AppendTrace -> RUN_DIR/trace/
    log     `laminar logs`: AskLog -> here: SendLog -> a rollout there: LogSent -> here: LogRead -> it

They go over the rollout's own line to the bulk door. A rollout is there while it asks for the controller.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.bulk_server import BulkAnswer
from laminar_hpc.line.messages.bulk import (
    LOG_BYTES_MAX,
    AppendTrace,
    AskLog,
    BulkRefused,
    LogRead,
    LogSent,
    SendLog,
    TraceStored,
)
from laminar_hpc.store import status

log = logging.getLogger(__name__)
_THERE_SECONDS = 8.0  # they ask each 2 s
_ANSWER_SECONDS = 5.0  # less than after what the one who asks asks again (line/bulk_client.py)


@dataclass(frozen=True)
class _LogWanted:
    """A log is awaited from `holder`; both are identities."""

    process: str
    asker: str
    holder: str
    until: float


class JoinedFiles:
    """For the thread of the bulk door."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._rollouts = dict[str, tuple[str, float]]()  # name -> identity, and when it was heard
        self._wanted = dict[int, _LogWanted]()
        self._count = 0
        self._answers = list[tuple[str, BulkAnswer]]()

    def heard(self, identity: str, rollout: str) -> None:
        """From a rollout of a machine that has joined; "" from others."""
        if rollout:
            self._rollouts[rollout] = identity, self._clock()

    def handle(
        self, identity: str, request: AskLog | LogSent | AppendTrace, body: bytes
    ) -> BulkAnswer | None:
        """As BulkHandler.handle."""
        if isinstance(request, AppendTrace):
            return TraceStored(request.process, self._append(request, body)), b""
        if isinstance(request, AskLog):
            self._ask(identity, request)
        else:
            self._sent(identity, request, body)
        return None

    def settle(self) -> Iterable[tuple[str, BulkAnswer]]:
        """As BulkHandler.settle."""
        now = self._clock()
        for number, wanted in list(self._wanted.items()):
            if now > wanted.until:
                del self._wanted[number]
                self._answers.append((wanted.asker, (BulkRefused(_gone(wanted.process)), b"")))
        answers, self._answers = self._answers, []
        return answers

    def _ask(self, identity: str, request: AskLog) -> None:
        holder = self._holder(request.process)
        self._count += 1
        self._wanted[self._count] = _LogWanted(
            request.process, identity, holder, self._clock() + _ANSWER_SECONDS
        )
        size = min(request.size, LOG_BYTES_MAX)
        self._answers.append((holder, (SendLog(request.process, size, self._count), b"")))

    def _sent(self, identity: str, request: LogSent, body: bytes) -> None:
        wanted = self._wanted.get(request.number)
        if wanted is None or wanted.holder != identity:
            return  # too late
        del self._wanted[request.number]
        answer = BulkRefused(request.trouble) if request.trouble else LogRead()
        self._answers.append((wanted.asker, (answer, body)))

    def _holder(self, process: str) -> str:
        """Whose line leads to its machine. Raises LaminarError."""
        now = self._clock()
        there = {
            name: identity for name, (identity, at) in self._rollouts.items() if now - at < _THERE_SECONDS
        }
        names = [f"rollout{process.removeprefix('engine')}" if process.startswith("engine") else process]
        if process.startswith("relay"):
            shown = status.read(self._run_dir)
            ranks = shown.ranks if shown is not None else []
            machines = {f"{rank.role}{rank.index}": rank.machine for rank in ranks}
            names = [
                name for name in there if process in machines and machines.get(name) == machines[process]
            ]
        for name in names:
            if name in there:
                return there[name]
        raise LaminarError(_gone(process))

    def _append(self, request: AppendTrace, body: bytes) -> int:
        """Bytes that are there then; what does not begin where the file ends is not taken. A disk that
        refuses ends nobody: it comes again."""
        path = self._run_dir / "trace" / f"{request.process}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", 0) as file:
                size = file.seek(0, os.SEEK_END)
                return size if size != request.offset else size + file.write(body)
        except OSError as error:
            log.info("%s lacks spans: %s", path, error)
            return request.offset


def _gone(process: str) -> str:
    return (
        f"{process} is not there now: its machine has left the run, or the line to it is cut; what it has "
        "written is in its own folder there, logs/"
    )
