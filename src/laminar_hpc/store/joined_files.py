"""On a machine that has joined a run and shares no folder with it: a rollout sends what its own trace and
those of this machine's relays have grown by, and gives the end of this machine's logs to whoever asks at the
run's side (controller/joined_files.py).

Which file is read is said here: `logs/NAME.log` of this machine's own folder, of a rollout, an engine or a
relay. One piece of a trace is under way at a time; it is sent again until it is there. Several rollouts of a
machine may send the same of a relay's, of which one piece counts.
"""

import os
from pathlib import Path

from laminar_hpc.line.messages.bulk import LOG_BYTES_MAX, AppendTrace, LogSent, SendLog

_PIECE_BYTES = 256 << 10
_AGAIN_SECONDS = 4.0


class OwnFiles:
    """For the thread of PayloadUploader. `folder`: of this machine; `rollout`: the process's name."""

    def __init__(self, folder: Path, rollout: str) -> None:
        self._folder = folder
        self._rollout = rollout
        self._stored = dict[str, int]()  # bytes of each trace that are there
        self._sent_at: float | None = None  # of what is under way

    def stored(self, process: str, size: int) -> None:
        """So much of a trace is there."""
        self._stored[process] = size
        self._sent_at = None

    @property
    def all_sent(self) -> bool:
        return self._sent_at is None and self._piece() is None

    def trace(self, now: float) -> tuple[AppendTrace, bytes] | None:
        """What is to be sent next, if anything is: whole lines."""
        if self._sent_at is not None and now - self._sent_at < _AGAIN_SECONDS:
            return None
        if (piece := self._piece()) is not None:
            self._sent_at = now
        return piece

    def _piece(self) -> tuple[AppendTrace, bytes] | None:
        relays = sorted(path.stem for path in (self._folder / "trace").glob("relay*.jsonl"))
        for process in (self._rollout, *relays):
            at = self._stored.get(process, 0)
            body = _read(self._folder / "trace" / f"{process}.jsonl", at, _PIECE_BYTES)
            if end := body.rfind(b"\n") + 1:
                return AppendTrace(process, at), body[:end]
        return None

    def log(self, request: SendLog) -> tuple[LogSent, bytes]:
        """The end of a log."""
        path = self._folder / "logs" / f"{request.process}.log"
        try:
            size = path.stat().st_size
        except OSError as error:
            return LogSent(request.number, f"{path} on its machine cannot be read ({error.strerror})"), b""
        wanted = min(request.size, LOG_BYTES_MAX)
        return LogSent(request.number), _read(path, max(0, size - wanted), wanted)


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)
