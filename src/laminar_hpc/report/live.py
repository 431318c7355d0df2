"""A run as it stands, gathered again and again from its files: what `laminar top` draws.

`Follower.look` reads status.json and whatever metrics.jsonl has grown by since the last look, so a look costs
the same late in a long run. It talks to no process: a run that goes on, one that ended and one that died are
read alike.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from laminar_hpc.store import status
from laminar_hpc.store.run_files import metrics_of
from laminar_hpc.store.status import Status

FRESH_SECONDS = 5.0  # a controller writes its status once a second; a busy one may miss a few
SILENT_SECONDS = 3.0  # a process that was not heard for longer is shown as silent
RECENT_STEPS = 60
BEHIND = ("score", "tool", "send")  # go on beside what a process itself does
TAIL_BYTES = 4096  # of a trace: room for some spans
HEAD_BYTES = 256


@dataclass
class View:
    """`state`: going on | ended | died | starting; `reason`: of an end."""

    run_dir: Path
    state: str = "starting"
    reason: str = ""
    status: Status | None = None  # of the newest launch
    pipeline: str = ""
    begun: float = 0.0  # by its first launch
    started: float = 0.0  # by its newest one
    last_sign: float = 0.0
    steps: deque[dict] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    evaluations: dict[str, dict] = field(default_factory=dict)  # the newest of each file
    newest: dict[str, dict] = field(default_factory=dict)  # kind -> its newest record
    # lost, regranted, given_up, move, move_off; rescued and loaded (of moves), reward_errors (of trained
    # ones)
    counts: dict[str, int] = field(default_factory=dict)
    processes: dict[str, dict] = field(default_factory=dict)  # traced ones -> the newest finished span, or {}
    wanted_steps: int | None = None


class RunFollower:
    """Follows one run directory; `hear` gets each record once, in order. `recent`: how many steps the view
    has, None for all. Raises LaminarError when it is no run."""

    def __init__(
        self,
        run_dir: Path,
        hear: Callable[[dict], None] = lambda _: None,
        recent: int | None = RECENT_STEPS,
    ) -> None:
        self._recent = recent
        self.view = self._new_view(Path(run_dir))
        self._hear = hear
        self._metrics = metrics_of(self.view.run_dir)
        self._head = b""  # how the file begins, which tells it from that of a run begun anew
        self._offset = 0

    def _new_view(self, run_dir: Path) -> View:
        return View(run_dir, steps=deque(maxlen=self._recent))

    def look(self, traces: bool = True) -> View:
        """The run now; `traces`: with what each process did last."""
        for record in self._new_records():
            self._take(record)
            self._hear(record)
        view = self.view
        latest = status.read(view.run_dir)
        # not that of an earlier launch
        view.status = latest if latest and latest.time >= view.started - 1.0 else None
        if view.status:
            view.wanted_steps = view.status.steps
            view.last_sign = max(view.last_sign, view.status.time)
        if traces:
            view.processes = _processes(view.run_dir)
        view.state = self._state()
        return view

    def _state(self) -> str:
        if self.view.reason:
            return "ended"
        alive = self.view.status is not None and status.age(self.view.status) < FRESH_SECONDS
        if alive:
            return "going on"
        return "starting" if time.time() - self.view.last_sign < FRESH_SECONDS else "died"

    def _new_records(self) -> Iterator[dict]:
        """Whole lines since the last look, from its start where the run was moved aside and begun anew."""
        try:
            file = open(self._metrics, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            return
        with file:
            if not (head := file.read(HEAD_BYTES)).startswith(self._head):
                self.view = self._new_view(self.view.run_dir)
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if record := _decoded(line):
                    yield record
        self._head = head[: self._offset]

    def _take(self, record: dict) -> None:
        view, kind = self.view, record.get("kind")
        view.last_sign = max(view.last_sign, record.get("time", 0.0))
        if kind == "start":
            view.started = record["time"]
            view.reason = ""
            view.pipeline = record.get("pipeline") or ""
            view.begun = view.begun or view.started
            view.newest.clear()
        if kind in ("start", "restored"):
            restored = record.get("restored_step") or 0
            kept = [step for step in view.steps if step["step"] <= restored]
            view.steps.clear()
            view.steps.extend(kept)
        elif kind == "end":
            view.reason = record.get("reason") or "done"
        elif kind == "step":
            view.steps.append(record)
            errors = int(record.get("reward_error_count") or 0)
            view.counts["reward_errors"] = view.counts.get("reward_errors", 0) + errors
        elif kind == "evaluation":
            view.evaluations[record.get("file", "")] = record
        elif kind:
            view.newest[kind] = record
            if kind in ("lost", "regranted", "given_up", "move", "move_off"):
                view.counts[kind] = view.counts.get(kind, 0) + 1
            if kind == "move":
                view.counts["rescued"] = view.counts.get("rescued", 0) + (record["source"] is None)
                view.counts["loaded"] = view.counts.get("loaded", 0) + record.get("loaded", False)


def _decoded(line: bytes) -> dict | None:
    try:
        return msgspec.json.decode(line, type=dict)
    except msgspec.DecodeError:
        return None


def _processes(run_dir: Path) -> dict[str, dict]:
    """Every traced process with its newest span, from the last few kilobytes of its trace."""
    processes = {}
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            records = [record for line in file.read().split(b"\n") if (record := _decoded(line))]
        spans = [r for r in records if {"kind", "t0", "t1"} <= r.keys() and r["kind"] not in BEHIND]
        processes[path.stem] = max(spans, key=lambda span: span["t1"], default={})
    return processes
