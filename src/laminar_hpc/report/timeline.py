"""The report's time line: what every process did when, as one SVG with all of the run and one with a window
of it.

Both show the same rectangles (drawn once, in seconds, stretched by a nested viewBox), so a zoom is a change
of one attribute; the page's script does that when a part of the upper figure is dragged over, and without
scripts both are still there. Time between launches is cut out.
"""

from collections.abc import Collection, Sequence

from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report import svg
from laminar_hpc.report.idle import busy, overlap, training_windows, union
from laminar_hpc.report.rundata import Run
from laminar_hpc.report.svg import tag

_LIKE = {"tool": "evaluate", "chain": "relay", "decide": "train", "commit": "checkpoint"}  # in colour
COLORS = {
    kind: f"var(--{_LIKE.get(kind, kind)})"
    for kind in (
        *("generate", "train", "publish", "send", "pull", "score", "tool", "wait", "evaluate"),
        *("checkpoint", "load", "relay", "chain", "decide", "commit", "move"),
    )
}
BACKGROUND = frozenset({"send", "move"})  # drawn as a strip under what the process itself does
WINDOW_SECONDS = 20.0
MAX_SPANS_PER_ROW = 1500  # of one kind; beyond that neighbours are joined, which no screen could tell apart
WIDTH, LABELS, ROW, BAR, AXIS = 1140, 130, 26, 20, 26
# A moment in which a process did several things counts for the first of these.
ACCOUNT_ORDER = (
    *("evaluate", "checkpoint", "pull", "publish", "relay", "chain", "train"),
    *("generate", "decide", "commit", "load", "wait"),
)
_ROLES = ("trainer", "relay", "rollout", "controller")


def rows(run: Run) -> dict[str, list[TraceSpan]]:
    """Lines of the figure: trainers, relays, rollouts (each with its tools and scoring), controller; those
    with spans."""
    found = {}
    for name in sorted(run.spans, key=_order):
        spans = run.spans[name]
        found[name] = [s for s in spans if s.kind not in ("score", "tool")]
        found[f"{name} tools"] = [s for s in spans if s.kind == "tool"]
        found[f"{name} rewards"] = [s for s in spans if s.kind == "score"]
    return {name: spans for name, spans in found.items() if spans}


def _order(name: str) -> tuple[int, int]:
    role = name.rstrip("0123456789")
    index = name[len(role) :]
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), int(index) if index else 0)


class RunTime:
    """Maps times since the epoch to seconds of run time, in which launches follow without a gap."""

    def __init__(self, run: Run) -> None:
        spans = [s for spans in run.spans.values() for s in spans]
        self.launches: list[tuple[float, float, float]] = []  # (start, end, run time at start)
        self.total = 0.0
        starts = [launch.start for launch in run.launches]  # none where nothing is written yet
        for launch, limit in zip(run.launches, [*starts[1:], float("inf")], strict=False):
            end = max([launch.end, *(min(s.t1, limit) for s in spans if launch.start <= s.t0 < limit)])
            self.launches.append((launch.start, end, self.total))
            self.total += end - launch.start

    def __call__(self, time: float) -> float:
        start, end, at = next(
            (launch for launch in reversed(self.launches) if launch[0] <= time), self.launches[0]
        )
        return at + min(max(time - start, 0.0), end - start)


def accounts(run: Run) -> list[tuple[str, list[tuple[str, float, str]]]]:
    """Per process (kind, seconds, colour) within the training windows, whose length they add up to."""
    windows = training_windows(run)
    length = sum(end - start for start, end in windows)
    result = []
    for name, spans in rows(run).items() if length > 0 else ():
        scoring = name.endswith(" rewards")
        present = {s.kind for s in spans} - BACKGROUND
        order = ["score"] if scoring else [kind for kind in ACCOUNT_ORDER if kind in present]
        seen, parts = 0.0, []
        for index, kind in enumerate(order):
            covered = overlap(busy(spans, order[: index + 1]), windows)
            parts.append((kind, covered - seen, COLORS[kind]))
            seen = covered
        parts.sort(key=lambda part: (part[0] == "wait", -part[1]))
        parts.append(("nothing to score" if scoring else "untraced", length - seen, "var(--none)"))
        result.append((name, [part for part in parts if part[1] > 0]))
    return result


def figures(run: Run, window_seconds: float = WINDOW_SECONDS) -> str:
    """Both figures as HTML, `window_seconds` in the lower one at first; empty without traces."""
    shown = rows(run)
    time = RunTime(run)
    if not shown or time.total <= 0:
        return ""
    windows = [(time(start), time(end)) for start, end in training_windows(run)]
    low, high = (windows[0][0], windows[-1][1]) if windows else (0.0, time.total)
    span = min(window_seconds, time.total)
    start = min(max(0.0, (low + high - span) / 2), time.total - span)
    height = len(shown) * ROW
    rectangles = "".join(_rectangles(spans, index, time) for index, spans in enumerate(shown.values()))
    for _, _, at in time.launches[1:]:
        place = {"x1": at, "x2": at, "y1": 0, "y2": height, "vector_effect": "non-scaling-stroke"}
        rectangles += tag("line", class_="launch", title="launch", **place)
    overview = _frame(
        shown, f"0 0 {time.total:.3f} {height}", tag("g", rectangles, id="spans"), 0.0, time.total, "overview"
    )
    detail = _frame(
        shown, f"{start:.3f} 0 {span:.3f} {height}", tag("use", href="#spans"), start, start + span, "detail"
    )
    present = {span.kind for spans in shown.values() for span in spans} - {"chain"}
    names = [kind for kind in COLORS if kind in present]
    hint = tag(
        "p",
        f"Seconds since the start. Below: <b id='window'>{start:.0f} s to {start + span:.0f} s</b><span "
        "class='script'>; drag over the "
        "figure above to choose another part, double-click it for all of the run</span>.",
        class_="hint",
    )
    legend = svg.legend([(_kind_name(kind), COLORS[kind]) for kind in names])
    content = legend + overview + hint + detail
    return tag("div", content, id="timeline", data_total=time.total, data_left=LABELS, data_width=WIDTH)


def _kind_name(kind: str) -> str:
    return {
        "send": "send (background)",
        "move": "move of a trajectory",
        "wait": "wait (idle)",
        "relay": "receive into slot",
        "score": "score rewards",
        "tool": "tool calls",
        "decide": "decide (controller)",
        "commit": "commit (controller)",
    }.get(kind, kind)


def _frame(shown: Collection[str], view: str, content: str, start: float, end: float, name: str) -> str:
    """Row names, the stretched content, and a time axis."""
    height, body = len(shown) * ROW, ""
    for index, row in enumerate(shown):
        body += tag("text", svg.text(row), class_="row", x=LABELS - 10, y=index * ROW + 15, text_anchor="end")
        body += tag("rect", x=LABELS, y=index * ROW, width=WIDTH - LABELS, height=BAR, fill="var(--none)")
    stretched = {"preserveAspectRatio": "none", "viewBox": view, "id": f"{name}-view"}
    body += tag("svg", content, x=LABELS, y=0, width=WIDTH - LABELS, height=height, **stretched)
    if name == "overview":
        body += tag("rect", id="brush", x=0, y=-1, width=0, height=height)
    x = svg.scale(start, end, LABELS, WIDTH - 1)
    labels = "".join(
        tag("text", f"{v:g}", class_="tick", x=x(v), y=height + 14, text_anchor="middle")
        for v in svg.ticks(start, end, 10)
    )
    body += tag("g", labels, class_="ticks", data_y=height + 14)
    box = f"0 -2 {WIDTH} {height + AXIS}"
    return tag(
        "svg", body, class_="timeline", id=name, viewBox=box, role="img", aria_label=f"time line: {name}"
    )


def _rectangles(spans: Sequence[TraceSpan], index: int, time: RunTime) -> str:
    """The spans of a row, in seconds of run time by pixels; waiting at the bottom, the background on top."""
    parts = []
    for kind in sorted({s.kind for s in spans}, key=lambda k: (k != "wait", k in BACKGROUND, k)):
        top, height = (index * ROW + BAR - 5, 5) if kind in BACKGROUND else (index * ROW, BAR)
        for t0, t1, title in _joined([s for s in spans if s.kind == kind], time):
            width = max(t1 - t0, 0.002)
            parts.append(tag("rect", x=t0, y=top, width=width, height=height, fill=COLORS[kind], title=title))
    return "".join(parts)


def _joined(spans: Sequence[TraceSpan], time: RunTime) -> list[tuple[float, float, str]]:
    """(start, end, tooltip) of spans; scoring: while any call was open; crowds joined until few."""
    placed = [(time(s.t0), time(s.t1), _title(s)) for s in spans]
    if spans and spans[0].kind == "score":
        placed = [(t0, t1, f"score, {t1 - t0:.2f} s") for t0, t1 in union((t0, t1) for t0, t1, _ in placed)]
    gap = 0.0
    while len(placed) > MAX_SPANS_PER_ROW:
        gap = gap * 2 or 0.005
        near = union((t0, t1 + gap) for t0, t1, _ in placed)
        placed = [
            (t0, max(t0, t1 - gap), f"{spans[0].kind}, joined over {t1 - gap - t0:.2f} s") for t0, t1 in near
        ]
    return placed


def _title(span: TraceSpan) -> str:
    """Kind, duration, and whatever was recorded with the span."""
    known = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in span.fields.items()
        if isinstance(value, str | int | float)
    ]
    return ", ".join([span.kind, f"{span.t1 - span.t0:.3f} s", *known])
