"""The decode curve of engines whose trajectories have several turns, from the begin and end of each turn.

How many requests an engine had at any time is known from the begins and ends of all turns, so each turn says
what its tokens took beside so many others:

    seconds = ask + step n + token n N + kv n K + prefill P

n drawn tokens beside N requests with K tokens of KV cache on average over its steps, and P tokens that were
prefilled meanwhile. Steps are fewer where they take longer, so N and K are averaged with a curve, and the
curve is found by turns with them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from laminar_hpc.simulator.finished.courses import Played
from laminar_hpc.simulator.finished.decode import (
    DecodeCurve,
    MeasuredBatch,
    Queue,
    not_negative,
    speed_of_each,
)
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import SimulatedRequest
from laminar_hpc.simulator.turns.course import Course

_ROUNDS = 4
_Column = NDArray[np.float64]


@dataclass(frozen=True)
class _Turns:
    """Of a local batch, a row each: begin and end in s, drawn tokens, mean context, prefilled tokens."""

    begin: _Column
    end: _Column
    drawn: _Column
    context: _Column
    prefilled: _Column


def turn_curve(batches: Sequence[Sequence[Played]], queue: Queue) -> DecodeCurve:
    """By least squares over all turns of local batches whose times are known."""
    tables = [_table(batch, queue.prompt_tokens) for batch in batches]
    step, token, kv = 1.0, 0.0, 0.0
    for _ in range(_ROUNDS):
        columns = np.concatenate([_columns(table, step, token, kv) for table in tables])
        seconds = np.concatenate([table.end - table.begin for table in tables])
        ask, step, token, kv, prefill = not_negative(columns, seconds)
    return DecodeCurve(0.0, step, token, kv, prefill, ask)


def _table(batch: Sequence[Played], prompt_tokens: int) -> _Turns:
    rows, prompts = list[tuple[float, float, float, float, float]](), set[int]()
    for each in sorted(batch, key=lambda played: played.turns[0][0]):
        course = each.course
        context, new = prompt_tokens + course.opening, course.opening
        new += prompt_tokens if each.group_id not in prompts else 0
        prompts.add(each.group_id)
        given = [*course.given, 0]
        for (begin, end), drawn, behind in zip(each.turns, course.drawn, given, strict=False):
            rows.append((begin, end, drawn, context + drawn / 2, new))
            context, new = context + drawn + behind, behind
    return _Turns(*np.array(rows, float).T)


def _columns(turns: _Turns, step: float, token: float, kv: float) -> NDArray[np.float64]:
    """[turns, 5]: what ask, step, token, kv and prefill are multiplied by."""
    times = np.unique(np.concatenate([turns.begin, turns.end]))
    first, last = np.searchsorted(times, turns.begin), np.searchsorted(times, turns.end)
    requests, held, arrived = (np.zeros(len(times)) for _ in range(3))
    for place, sign in ((first, 1.0), (last, -1.0)):
        np.add.at(requests, place, sign)
        np.add.at(held, place, sign * turns.context)
    np.add.at(arrived, first, turns.prefilled)
    n, k = np.cumsum(requests)[:-1], np.cumsum(held)[:-1]
    steps = np.diff(times) / np.maximum(step + token * n + kv * k, 1e-12)

    def sums(values: _Column) -> _Column:
        before = np.concatenate([[0.0], np.cumsum(values)])
        found: _Column = before[last] - before[first]
        return found

    all_steps = np.maximum(sums(steps), 1e-12)
    beside, cache = sums(steps * n) / all_steps, sums(steps * k) / all_steps
    ones, drawn = np.ones(len(first)), turns.drawn
    return np.stack([ones, drawn, drawn * beside, drawn * cache, sums(arrived)], axis=1)


def turn_speeds(
    batches: Sequence[tuple[MeasuredBatch, Sequence[Played]]],
    curve: DecodeCurve,
    queue: Queue,
    timeout_seconds: float,
) -> dict[int, float]:
    """How fast each replica was beside the curve, by the ends of whole local batches, as `decode.speeds`."""
    found = []
    for batch, played in batches:
        if batch.seconds is not None:
            turns = replayed(played, curve, queue, timeout_seconds)
            found.append((batch.replica, max(of[-1][1] for of in turns), batch.seconds))
    return speed_of_each(found)


def replayed(
    played: Sequence[Played], curve: DecodeCurve, queue: Queue, timeout_seconds: float
) -> list[list[tuple[float, float]]]:
    """A local batch through the simulator's engine, with its calls' times: begin and end of each turn."""
    engine = SimulatedReplica(
        0, curve.costs(curve.prefill), queue.kv_cache_tokens, queue.max_concurrent, queue.admission, 1
    )
    prompt, courses = queue.prompt_tokens, [each.course for each in played]
    groups = [SimpleNamespace(group_id=each.group_id) for each in played]
    requests = [
        SimulatedRequest(i, groups[i], course.drawn, prompt + course.opening, 0)
        for i, course in enumerate(courses)
    ]
    coming = [(curve.ask, i) for i in range(len(requests))]
    begins, found = [0.0] * len(requests), [list[tuple[float, float]]() for _ in requests]
    while coming or engine.running or engine.waiting:
        time = engine.next_time()
        if coming and coming[0][0] <= time:
            at, i = heapq.heappop(coming)
            engine.advance(at)
            engine.waiting.append(requests[i])
        else:
            engine.advance(time, at_event=True)
            for request in engine.pop_finished():
                i = request.trajectory_id
                found[i].append((begins[i], engine.clock))
                seconds = _until_its_next_turn(request, courses[i], queue)
                if seconds is not None:
                    begins[i] = engine.clock + min(seconds, timeout_seconds)
                    heapq.heappush(coming, (begins[i] + curve.ask, i))
            if engine.kv >= engine.full:
                engine.make_room()
        engine.fill()
    return found


def _until_its_next_turn(request: SimulatedRequest, course: Course, queue: Queue) -> float | None:
    """Seconds; None where its last turn has ended, or where there is no room for what it was given."""
    request.turn += 1
    if request.turn == len(request.turns) or course.given[request.turn - 1] >= queue.admission.longest:
        return None
    given = course.given[request.turn - 1]
    request.remaining = float(request.turns[request.turn])
    request.context += given
    request.uncached = given
    return course.took[request.turn - 1].seconds
