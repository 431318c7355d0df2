"""What trajectories of several turns did in a run, from its payload files, store and traces: the tokens of
each turn, what was given behind it, what calls and resets took, and which of them never returned."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report.rundata import Consumed, Run
from laminar_hpc.report.turn_table import tool_spans
from laminar_hpc.simulator.turns.course import Course, Known, Took
from laminar_hpc.store.payload.layout import Response

_AT_ONCE = 2000  # responses that are read together
_CUT_OFF = 0.98  # of environment.timeout_seconds: what takes as long was given up


@dataclass(frozen=True)
class Played:
    """One trajectory. `turns`: begin and end of each, seconds since the epoch; empty where unknown."""

    id: int
    group_id: int
    course: Course
    turns: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Turns:
    """A run's. `played` by trajectory id."""

    played: dict[int, Played]
    known: Known

    def scaled(self, by: Mapping[int, float]) -> "Turns":
        """With `by` times as many drawn tokens in each turn, by trajectory id."""
        played = {i: replace(each, course=each.course.scaled(by[i])) for i, each in self.played.items()}
        return Turns(played, replace(self.known, groups=_groups(played.values())))


def read_turns(run: Run, trained: Sequence[Consumed], limits: EnvironmentConfig, longest: int) -> Turns:
    """Of the trajectories `trained`, whose responses have at most `longest` tokens."""
    rows, played = {t.id: t for t in trained}, dict[int, Played]()
    spans = tool_spans(run, trained)
    ids = sorted(rows)
    for start in range(0, len(ids), _AT_ONCE):
        for whole in run.wholes(ids[start : start + _AT_ONCE]):
            row = rows[whole.record.trajectory_id]
            played[row.id] = played_as(row, whole.response, spans[row.id], limits, longest)
    begin = min(t.time_started for t in trained)
    calls, resets = taken(_of_training(run, begin), limits)
    return Turns(played, Known(_groups(played.values()), calls or [Took(0.0)], resets))


def played_as(
    row: Consumed, response: Response, spans: Sequence[TraceSpan], limits: EnvironmentConfig, longest: int
) -> Played:
    """`spans`: of its calls, in order."""
    drawn, given = response.mask_runs[::2].tolist(), response.mask_runs[1::2].tolist()
    opening = given.pop(0) if given and not drawn[0] else 0
    drawn = drawn[1:] if opening else drawn
    if len(drawn) == len(given):  # it was cut behind an answer
        drawn.append(1)
    no_room = row.finish_reason == "length" and len(spans) == len(given) + 1  # for the last answer
    turns = tuple[tuple[float, float], ...]()
    took, calls = [Took(0.0)] * len(given), [1] * len(given)
    if no_room or len(spans) == len(given):
        begins = [row.time_started, *(span.t1 for span in spans)]
        ends = [*(span.t0 for span in spans), row.time_finished]
        turns = tuple((a, max(a, b)) for a, b in zip(begins, ends, strict=True))
        took, calls = [_took(span, limits) for span in spans], [_calls(span) for span in spans]
    if no_room:
        given, drawn, turns = [*given, longest], [*drawn, 1], turns[:-1]
    course = Course(tuple(drawn), tuple(given), tuple(calls), tuple(took), opening=opening)
    return Played(row.id, row.group_id, course, turns)


def _calls(span: TraceSpan) -> int:
    what = str(span.fields.get("what", ""))
    return 0 if what in ("malformed", "agent") else what.count(",") + 1


def _of_training(run: Run, begin: float) -> Iterable[TraceSpan]:
    for name, spans in run.spans.items():
        if name.startswith("rollout"):
            tools = (span for span in spans if span.kind == "tool" and span.t0 >= begin)
            yield from (span for span in tools if not span.fields.get("evaluation"))


def taken(spans: Iterable[TraceSpan], limits: EnvironmentConfig) -> tuple[list[Took], list[Took]]:
    """What calls, and what resets took."""
    calls, resets = list[Took](), list[Took]()
    for span in spans:
        (resets if span.fields.get("what") == "reset" else calls).append(_took(span, limits))
    return calls, resets


def _took(span: TraceSpan, limits: EnvironmentConfig) -> Took:
    seconds, failed = span.t1 - span.t0, str(span.fields.get("failed", ""))
    hung = failed == "hung" or seconds >= _CUT_OFF * limits.timeout_seconds
    return Took(math.inf if hung else seconds, bool(failed))


def _groups(played: Iterable[Played]) -> list[list[Course]]:
    groups = defaultdict[int, list[Course]](list)
    for each in sorted(played, key=lambda each: each.id):
        groups[each.group_id].append(each.course)
    return [groups[group] for group in sorted(groups)]
