"""What a process did and when: spans, one JSON line each, in run_dir/trace/<role><index>.jsonl.

Every role opens one `Trace` and calls `span` around its work; `summary` and `report` read them back with
`read_spans`. Times are seconds since the Unix epoch, so that processes of one machine share a time line. A
span costs one small write, some 10 microseconds.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from laminar_hpc.machine.files import jsonl

log = logging.getLogger(__name__)

# Every kind of span. `publish` is the time in which the trainer stands still for a publication, `send` the
# rest of it, behind its back.
KINDS = tuple(
    "load generate score tool pull train publish send wait checkpoint evaluate relay chain decide commit "
    "move".split()
)
# What keeps a process busy: not its waiting, nor what goes on behind its back, as sending weights or scoring
# in reward workers.
BUSY = frozenset(KINDS) - {"score", "tool", "send", "wait", "move"}


class TraceSpan(NamedTuple):
    """`kind` from `t0` to `t1` (seconds since the epoch) with whatever else was recorded of it."""

    kind: str
    t0: float
    t1: float
    fields: dict


class Trace:
    """Appends the spans of one process to its file. Thread-safe; a span is in the file when it ends, also
    when it ends by an exception."""

    def __init__(self, run_dir: Path, role: str, index: int) -> None:
        self.path = Path(run_dir) / "trace" / f"{role}{index}.jsonl"
        self._file = jsonl.Appender(self.path)
        self._lacks = False  # the newest one

    @contextmanager
    def span(self, kind: str, **fields: object) -> Iterator[dict]:
        """Records the block as a span of `kind`. Gives the dict of fields, to which the block may add."""
        t0 = time.time()
        try:
            yield fields
        finally:
            self.record(kind, t0, time.time(), **fields)

    def record(self, kind: str, t0: float, t1: float, **fields: object) -> None:
        """Records a span that is over, if the disk takes it. Raises ValueError for a kind not in KINDS."""
        if kind not in KINDS:
            raise ValueError(f"'{kind}' is no kind of span; those there are: {', '.join(KINDS)}")
        try:
            self._file.write({"kind": kind, "t0": t0, "t1": t1, **fields})
            self._lacks = False
        except OSError as error:  # a full disk: nobody dies of what is only to be looked at
            if not self._lacks:
                log.warning("%s lacks spans: %s", self.path, error)
            self._lacks = True

    def close(self) -> None:
        self._file.close()


def read_spans(run_dir: Path) -> dict[str, list[TraceSpan]]:
    """Process name (trainer0, rollout1, ...) -> its spans in order of their starts."""
    spans = {}
    for path in sorted((Path(run_dir) / "trace").glob("*.jsonl")):
        records = [r for r in jsonl.read(path) if {"kind", "t0", "t1"} <= r.keys()]
        spans[path.stem] = sorted(
            (TraceSpan(r.pop("kind"), r.pop("t0"), r.pop("t1"), r) for r in records), key=lambda span: span.t0
        )
    return spans
