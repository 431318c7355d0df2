"""The decode curve of a run's engines, from when the trajectories of its local batches had their last token.

A local batch goes through the simulator's own `Replica` once, with steps in place of seconds: that says how
many steps, generated tokens and token-steps of KV lie before each end, whatever the queue, and the seconds of
the run are fitted to these three.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar_hpc.report.rundata import Run
from laminar_hpc.simulator.cost import EngineCosts
from laminar_hpc.simulator.replica import Replica
from laminar_hpc.simulator.request import Admission, Request

_ROWS = 32  # ends of a local batch that are looked at, evenly spread, the last one among them
_LATE = 0.05  # seconds by which a trajectory's end may be noted after that of its local batch
_NOTHING = dict.fromkeys(
    (
        "weights",
        "kv_token",
        "compute",
        "request",
        "prefill_token",
        "prefill_attention",
        "pull",
        "global_sync",
        "move_token",
        "move_latency",
        "restart",
    ),
    0.0,
)
_STEPS = EngineCosts(overhead=1.0, **_NOTHING)  # an engine whose seconds are decode steps


@dataclass(frozen=True)
class LocalBatch:
    """Of one replica: (response tokens, seconds from its begin to the last token) of each trajectory, in the
    order in which they were granted, and the seconds of the whole."""

    replica: int
    seconds: float
    ends: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class DecodeCurve:
    """Seconds of a local batch: `start`, `step` per decode step, `token` per generated token, and `kv` per
    token of KV cache and step."""

    start: float
    step: float
    token: float
    kv: float = 0.0


@dataclass(frozen=True)
class Queue:
    """What decides when an engine takes a request: tokens of a prompt, of the KV cache, and requests at
    once."""

    prompt_tokens: int
    kv_cache_tokens: int
    max_concurrent: int
    admission: Admission


def local_batches(run: Run, begin: float, end: float) -> list[LocalBatch]:
    """Those that began and ended between two times, without each replica's first, which is slow, and without
    those that trajectories left or came to on their way."""
    by_replica: dict[int, list[tuple[float, int, int]]] = {}
    for t in run.consumed:
        by_replica.setdefault(t.replica, []).append((t.time_finished, t.id, t.response_length))
    batches = []
    for name, spans in run.spans.items():
        if not name.startswith("rollout"):
            continue
        replica = int(name.removeprefix("rollout"))
        mine = sorted(by_replica.get(replica, []))
        times = [finished for finished, *_ in mine]
        inside = [s for s in spans if s.kind == "generate" and s.t0 >= begin and s.t1 <= end]
        for span in inside[1:]:
            first, last = np.searchsorted(times, [span.t0, span.t1 + _LATE], side="right")
            ended = sorted((i, length, finished - span.t0) for finished, i, length in mine[first:last])
            if ended and len(ended) == span.fields.get("trajectories", len(ended)):
                ends = tuple((length, seconds) for _, length, seconds in ended)
                batches.append(LocalBatch(replica, span.t1 - span.t0, ends))
    return batches


def work_before(lengths: Sequence[int], queue: Queue) -> list[tuple[float, float, float]]:
    """Of each response of a local batch: decode steps, generated tokens and token-steps of KV until its
    end."""
    replica = Replica(0, _STEPS, queue.kv_cache_tokens, queue.max_concurrent, queue.admission, 1)
    replica.waiting.extend(Request(i, None, [n], [], queue.prompt_tokens, 0) for i, n in enumerate(lengths))
    replica.pending = len(lengths)
    replica.fill()
    found = [(0.0, 0.0, 0.0)] * len(lengths)
    while replica.running:
        replica.advance(replica.next_time(), at_event=True)
        for request in replica.pop_finished():
            replica.pending -= 1
            found[request.trajectory_id] = (replica.steps, replica.generated, replica.kv_seconds)
        if replica.kv >= replica.full:
            replica.make_room()
        replica.fill()
    return found


def decode_curve(batches: Sequence[LocalBatch], queue: Queue) -> DecodeCurve:
    """By least squares over the ends of all local batches; the end of a local batch weighs as much as all
    others of it together."""
    rows, seconds = list[list[float]](), list[float]()
    for batch in batches:
        work = work_before([length for length, _ in batch.ends], queue)
        order = sorted(range(len(work)), key=lambda i: work[i][0])
        chosen = order[:-1][:: max(1, len(order) // _ROWS)]
        for i in chosen:
            rows.append([1.0, *work[i]])
            seconds.append(batch.ends[i][1])
        weight = max(1, len(chosen))
        rows.append([weight * value for value in (1.0, *work[order[-1]])])
        seconds.append(weight * batch.seconds)
    return DecodeCurve(*not_negative(np.array(rows), np.array(seconds)))


def not_negative(columns: np.ndarray, values: np.ndarray) -> list[float]:
    """Least squares of `values` [rows] on `columns` [rows, n] without negative coefficients: the most
    negative one is left out of the fit until there is none. Gives n coefficients."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    kept = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq(columns[:, kept] / scale[kept], values, rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            of = dict(zip(kept, np.maximum(found, 0.0) / scale[kept], strict=True))
            return [float(of.get(i, 0.0)) for i in range(columns.shape[1])]
        kept.pop(int(np.argmin(found)))


def speeds(batches: Sequence[LocalBatch], curve: DecodeCurve, queue: Queue) -> dict[int, float]:
    """How fast each replica was beside the curve of all: 1.1 took a tenth less time."""
    expected: dict[int, float] = {}
    taken: dict[int, float] = {}
    for batch in batches:
        work = work_before([length for length, _ in batch.ends], queue)
        steps, tokens, kv = max(work)
        seconds = curve.start + curve.step * steps + curve.token * tokens + curve.kv * kv
        expected[batch.replica] = expected.get(batch.replica, 0.0) + seconds
        taken[batch.replica] = taken.get(batch.replica, 0.0) + batch.seconds
    return {replica: expected[replica] / seconds for replica, seconds in taken.items()}
