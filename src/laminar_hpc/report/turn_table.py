"""The turns of one trajectory, for its page: what the model said and what it was given, which of it is
trained, and when it was generated, waited, or had a tool at work."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report import svg
from laminar_hpc.report.rundata import Consumed, Run
from laminar_hpc.report.svg import tag, text
from laminar_hpc.report.turns import COLORS
from laminar_hpc.store.payload.whole import Whole

SHOWN_SECONDS = 0.02  # a shorter wait is not told apart from the turn
COLUMNS = ("turn", "by", "", "tokens", "loss mask", "seconds")


class Stretch(NamedTuple):
    """Tokens that one side wrote. `seconds`: (kind, seconds) as in COLORS; empty where they are not known."""

    drawn: bool
    by: str
    tokens: list[int]
    seconds: list[tuple[str, float]]


def tool_spans(run: Run, rows: Sequence[Consumed]) -> dict[int, list[TraceSpan]]:
    """Trajectory -> the spans of its tool calls, in order; of its last attempt, where that ended."""
    found: dict[int, list[TraceSpan]] = {row.id: [] for row in rows}
    by_id = {row.id: row for row in rows}
    for process, spans in run.spans.items():
        for span in spans:
            row = by_id.get(span.fields.get("trajectory_id", -1))
            if row is None or span.kind != "tool" or process != f"rollout{row.replica}":
                continue
            whole = row.time_started <= span.t0 and span.t1 <= row.time_finished
            if whole and not span.fields.get("evaluation") and span.fields.get("what") != "reset":
                found[row.id].append(span)
    return found


def table(row: Consumed, whole: Whole, tools: Sequence[TraceSpan], said: Callable[[list[int]], str]) -> str:
    """A bar of its time, then a row for each stretch; `said`: tokens -> markup."""
    shown = stretches(row, whole, tools)
    parts = [(kind, seconds, COLORS[kind]) for each in shown for kind, seconds in each.seconds]
    bar = svg.legend(list(COLORS.items())) + svg.stacked_bars([("time", parts)]) if parts else ""
    head, turn, body = tag("tr", "".join(tag("th", name) for name in COLUMNS)), 0, ""
    for each in shown:
        turn += each.drawn
        took = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in each.seconds) or "-"
        before, after = (turn, each.by), (len(each.tokens), int(each.drawn), took)
        cells = [*map(text, before), said(each.tokens), *map(text, after)]
        body += tag("tr", "".join(tag("td", cell) for cell in cells))
    return bar + tag("table", head + body, class_="turns")


def stretches(row: Consumed, whole: Whole, tools: Sequence[TraceSpan]) -> list[Stretch]:
    """In the order of the tokens. A trajectory that moved has spans elsewhere too: then no times are told."""
    response, at, begun = whole.response, 0, False
    branches = response.starts
    found = list[Stretch]()
    for number, count in enumerate(response.mask_runs.tolist()):
        drawn = number % 2 == 0
        begun = begun or (drawn and count > 0)
        by = "model" if drawn else "history" if at in branches else "tool" if begun else "reset"
        if count:
            found.append(Stretch(drawn, by, response.tokens[at : at + count].tolist(), []))
        at += count
    calls = sum(each.by in ("tool", "history") for each in found)
    # the results of the last call may have had no room
    known = len(tools) == calls or (row.finish_reason == "length" and len(tools) == calls + 1)
    return _timed(row, found, tools, whole.record.reward_parts) if known else found


def _timed(
    row: Consumed, found: list[Stretch], tools: Sequence[TraceSpan], parts: Mapping[str, float]
) -> list[Stretch]:
    """With the seconds of each: of a turn up to its tools' span, which says how long the turn had waited;
    of the last turn the generation that is left of all."""
    left, clock, generated = list(tools), row.time_started, 0.0
    timed = list[Stretch]()
    for each in found:
        if each.by == "model":
            whole = (left[0].t0 if left else row.time_finished) - clock
            asleep = 0.0  # before its first turn it has not begun
            if left and timed:
                asleep = float(left[0].fields.get("waited", 0.0))
            elif timed:
                asleep = whole - parts.get("environment.generate_seconds", whole + generated) + generated
            asleep = min(max(asleep, 0.0), whole) if asleep > SHOWN_SECONDS else 0.0
            generated += whole - asleep
            seconds = [("wait", asleep)] if asleep else []
            timed.append(each._replace(seconds=[*seconds, ("generate", whole - asleep)]))
        elif each.by in ("tool", "history"):
            span = left.pop(0)
            clock = span.t1
            by, took = str(span.fields.get("what", "tool")), span.t1 - span.t0
            by += ", history" if each.by == "history" else ""
            timed.append(each._replace(by=by, seconds=[("tool", took)]))
        else:
            timed.append(each)
    return timed
