"""How idle processes were: the share of a window in which a process was in no activity.

A process is busy while at least one of its spans of a kind in `trace.BUSY` is open (the union: overlapping
spans count once); waiting and untraced time are idle. The windows are, per launch, from the start of the
first `train` span to the end of the last: from the first batch taken to the last step done, so that starting
up and the evaluations before and after do not count.
"""

from collections.abc import Iterable, Sequence

from laminar_hpc.machine.observability.trace import BUSY, TraceSpan
from laminar_hpc.report.rundata import Run

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def overlap(intervals: Sequence[Interval], windows: Sequence[Interval]) -> float:
    """Seconds of disjoint `intervals` that lie within disjoint `windows`."""
    return sum(
        max(0.0, min(end, w_end) - max(start, w_start))
        for start, end in intervals
        for w_start, w_end in windows
    )


def busy(spans: Iterable[TraceSpan], kinds: Iterable[str] = BUSY) -> list[Interval]:
    """When at least one span of `kinds` was open."""
    kinds = frozenset(kinds)
    return union((span.t0, span.t1) for span in spans if span.kind in kinds)


def training_windows(run: Run) -> list[Interval]:
    """Per launch that trained: from its first batch taken to its last step done."""
    trained = sorted(
        (s.t0, s.t1)
        for name, spans in run.spans.items()
        if name.startswith("trainer")
        for s in spans
        if s.kind == "train"
    )
    starts = [launch.start for launch in run.launches[1:]] + [float("inf")]
    windows, begin = [], float("-inf")
    for end in starts:
        mine = [interval for interval in trained if begin <= interval[0] < end]
        if mine:
            windows.append((mine[0][0], max(t1 for _, t1 in mine)))
        begin = end
    return windows


def idle_fraction(run: Run, role: str) -> float | None:
    """Idle process-seconds of `role` (trainer, rollout) over all of its seconds; None without traces."""
    windows = training_windows(run)
    length = sum(end - start for start, end in windows)
    processes = [spans for name, spans in run.spans.items() if name.rstrip("0123456789") == role]
    if not processes or length <= 0:
        return None
    return 1.0 - sum(overlap(busy(spans), windows) for spans in processes) / (length * len(processes))
