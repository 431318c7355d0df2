"""The decode curve of a run's engines, from when the trajectories of its local batches had their last token.

A local batch goes through the simulator's own `SimulatedReplica` once, with steps in place of seconds. That
gives the decode steps, generated tokens and token-steps of KV before each end, whatever the queue; the
seconds of the run are fitted to these three.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar_hpc.report.rundata import Run
from laminar_hpc.simulator.cost import EngineCosts
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import EngineAdmission, SimulatedRequest

_ROWS = 32  # ends of a local batch that are looked at, evenly spread, the last one among them
_LATE = 0.05  # seconds by which a trajectory's end may be noted after that of its local batch
_STEPS = EngineCosts(overhead=1.0)  # an engine whose seconds are decode steps


@dataclass(frozen=True)
class MeasuredBatch:
    """Of one replica: (response tokens, seconds from its begin to the last token) of each trajectory, in the
    order in which they were granted; None for those that ended after the first move from or to the replica.
    `seconds`: of the whole, None where there was a move. `ids`: of the trajectories, in the same order."""

    replica: int
    seconds: float | None
    ends: tuple[tuple[int, float | None], ...]
    ids: tuple[int, ...] = ()

    @property
    def lengths(self) -> list[int]:
        return [length for length, _ in self.ends]


@dataclass(frozen=True)
class DecodeCurve:
    """Seconds of a local batch: `start`, `step` per decode step, `token` per generated token, and `kv` per
    token of KV cache and step. With several turns in place of `start`: `prefill` per token of prompts and of
    what environments gave, which all others wait for, and `ask` for a turn's way to the engine."""

    start: float
    step: float
    token: float
    kv: float = 0.0
    prefill: float = 0.0
    ask: float = 0.0

    def costs(self, prefill_token: float) -> EngineCosts:
        """Returns the costs of an engine that decodes at this speed and does nothing else."""
        return EngineCosts(
            overhead=max(self.step, 1e-9),
            kv_token=self.kv,
            request=self.token,
            prefill_token=prefill_token,
            ask=self.ask,
        )


@dataclass(frozen=True)
class Queue:
    """What decides when an engine takes a request: tokens of prompt and KV cache, requests at once."""

    prompt_tokens: int
    kv_cache_tokens: int
    max_concurrent: int
    admission: EngineAdmission


def local_batches(run: Run, begin: float, end: float) -> list[MeasuredBatch]:
    """Those that began and ended between two times, without each replica's first, which is slow, and without
    those of which a trajectory was not trained."""
    trained = {t.id: t for t in run.consumed}
    ended, moves = defaultdict[int, list[tuple[float, int]]](list), defaultdict[int, list[dict]](list)
    for t in run.consumed:
        ended[t.replica].append((t.time_finished, t.id))
    for move in run.records.get("move", []):
        for replica in {move["source"], move["destination"]}:
            moves[replica].append(move)
    batches = []
    for name, spans in run.spans.items():
        if not name.startswith("rollout"):
            continue
        replica = int(name.removeprefix("rollout"))
        mine = sorted(ended[replica])
        times = [finished for finished, _ in mine]
        inside = [s for s in spans if s.kind == "generate" and s.t0 >= begin and s.t1 <= end]
        for span in inside[1:]:
            first, last = np.searchsorted(times, [span.t0, span.t1 + _LATE], side="right")
            here = {i for _, i in mine[first:last]}
            moved = [m for m in moves[replica] if span.t0 < m["time"] <= span.t1 + _LATE]
            begun = _begun(replica, here, moved)
            if begun <= trained.keys() and len(begun) == span.fields.get("trajectories", len(begun)) > 0:
                until = min((m["time"] - m["seconds"] for m in moved), default=span.t1 + _LATE)
                ends = [(trained[i].response_length, trained[i].time_finished) for i in sorted(begun)]
                seconds = None if moved else span.t1 - span.t0
                known = tuple((n, at - span.t0 if at <= until else None) for n, at in ends)
                batches.append(MeasuredBatch(replica, seconds, known, tuple(sorted(begun))))
    return batches


def _begun(replica: int, ended: set[int], moves: Sequence[dict]) -> set[int]:
    """The trajectories that a local batch began with: those that ended here or left, none that came."""
    first: dict[int, dict] = {}
    for move in moves:
        first.setdefault(move["trajectory_id"], move)
    came = {i for i, move in first.items() if move["destination"] == replica}
    return (ended | first.keys()) - came


def work_before(lengths: Sequence[int], queue: Queue) -> list[tuple[float, float, float]]:
    """Of each response of a local batch: decode steps, generated tokens and KV token-steps until its end."""
    replica = SimulatedReplica(0, _STEPS, queue.kv_cache_tokens, queue.max_concurrent, queue.admission, 1)
    replica.waiting.extend(
        SimulatedRequest(i, None, [n], queue.prompt_tokens, 0) for i, n in enumerate(lengths)
    )
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


def decode_curve(batches: Sequence[MeasuredBatch], queue: Queue) -> DecodeCurve:
    """By least squares over the ends of all local batches; the end of a local batch weighs as much as all
    others of it together."""
    rows, seconds = list[list[float]](), list[float]()
    for batch in batches:
        work = work_before(batch.lengths, queue)
        order = [
            i for i in sorted(range(len(work)), key=lambda i: work[i][0]) if batch.ends[i][1] is not None
        ]
        chosen = order[:: max(1, len(order) // _ROWS)]
        for i in chosen:
            rows.append([1.0, *work[i]])
            seconds.append(batch.ends[i][1] or 0.0)
        if batch.seconds is not None:
            weight = max(1, len(chosen))
            rows.append([weight * value for value in (1.0, *max(work))])
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


def speeds(batches: Sequence[MeasuredBatch], curve: DecodeCurve, queue: Queue) -> dict[int, float]:
    """How fast each replica was beside the curve of all, by the last known end of each local batch: 1.1 took
    a tenth less time."""
    found = []
    for batch in batches:
        work = work_before(batch.lengths, queue)
        known = [(end, work[i]) for i, (_, end) in enumerate(batch.ends) if end is not None]
        if not known:
            continue
        last, (steps, tokens, kv) = max(known)
        seconds = curve.start + curve.step * steps + curve.token * tokens + curve.kv * kv
        found.append((batch.replica, seconds, batch.seconds or last))
    return speed_of_each(found)


def speed_of_each(found: Iterable[tuple[int, float, float]]) -> dict[int, float]:
    """`found`: (replica, expected seconds, seconds taken) of each local batch."""
    expected = defaultdict[int, float](float)
    taken = defaultdict[int, float](float)
    for replica, by_curve, seconds in found:
        expected[replica] += by_curve
        taken[replica] += seconds
    return {replica: expected[replica] / seconds for replica, seconds in taken.items()}
