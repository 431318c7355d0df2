"""Small charts as SVG text, for the report: lines, histograms, stacked bars. Pure functions; colours are CSS
values of the page.

Every chart has one viewBox in pixels and scales with its column. Values that are None or not finite are left
out; a chart without values says so instead of drawing an empty frame.
"""

import html
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# margins around the plot, for tick labels and the name of the x axis
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40
HALF, THIRD = 560, 380  # widths of charts, two or three of which stand side by side
HEIGHT = 250
_BINS = 28  # of a histogram of lengths

# what may be closed at once; HTML's elements may not
SHAPES = frozenset({"rect", "line", "circle", "polyline", "use"})


@dataclass
class Series:
    """One line or, with `points`, one set of marks. `faint`: drawn thin, behind."""

    name: str
    color: str
    values: Sequence[tuple[float, float | None]]
    points: bool = False
    hollow: bool = False
    faint: bool = False


def text(value: object) -> str:
    """Any value as escaped markup."""
    return html.escape(str(value))


def tag(name: str, content: str = "", /, *, title: str = "", **attributes: object) -> str:
    """An element of `content`, markup; `title`: its tooltip; attributes: `text_anchor` is text-anchor."""
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{_written(value)}"' for key, value in attributes.items()
    )
    inner = (f"<title>{text(title)}</title>" if title else "") + content
    return f"<{name}{written}/>" if name in SHAPES and not inner else f"<{name}{written}>{inner}</{name}>"


def row(*cells: object, cell: str = "td") -> str:
    """A row of a table, of plain values; `cell`: td, or th in the head."""
    return tag("tr", "".join(tag(cell, text(value)) for value in cells))


def _written(value: object) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else text(value)


def short(value: float) -> str:
    """A number for a tick or a tooltip: at most some five characters."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}"


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within [low, high]; with `whole` at least 1 apart."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / about
    power = 10 ** math.floor(math.log10(raw))
    step = max(next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999), 1.0 if whole else 0.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; with 2 and 5 between them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = math.log10(high / low) < 3
    values = [m * 10.0**p for p in powers for m in ((1, 2, 5) if few else (1,))]
    return [v for v in values if low * 0.999 <= v <= high * 1.001]


def scale(low: float, high: float, start: float, end: float, log: bool = False) -> Callable[[float], float]:
    """Maps [low, high] to pixels [start, end]."""
    place = math.log10 if log else float
    a, b = place(low), place(high)
    return lambda value: start + (place(value) - a) / ((b - a) or 1.0) * (end - start)


def figure(width: int, height: int, body: str, label: str) -> str:
    """An SVG of `width` x `height` pixels around `body`; `label` is for screen readers."""
    return tag("svg", body, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)


def empty(why: str, width: int = THIRD, height: int = HEIGHT) -> str:
    """A chart without values: it says why."""
    said = tag("text", text(why), x=width / 2, y=height / 2, class_="none", text_anchor="middle")
    return figure(width, height, said, why)


@dataclass
class Plot:
    """A frame with its two scales; the methods give parts of its content."""

    width: int
    height: int
    x: Callable[[float], float]
    y: Callable[[float], float]

    @staticmethod
    def over(
        width: int, height: int, x: tuple[float, float], y: tuple[float, float], log: str = ""
    ) -> "Plot":
        """A frame for these two ranges; `log`: the axes that are logarithmic, "x" or "y"."""
        right, bottom = width - RIGHT, height - BOTTOM
        return Plot(width, height, scale(*x, LEFT, right, log == "x"), scale(*y, bottom, TOP, log == "y"))

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def axes(
        self,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        x_name: str,
        y_format: Callable[[float], str] = short,
    ) -> str:
        """Grid lines, tick labels and the name of the x axis."""
        right = self.width - RIGHT
        body = ""
        for value in y_ticks:
            at = self.y(value)
            body += tag("line", class_="grid", x1=LEFT, x2=right, y1=at, y2=at)
            body += tag("text", y_format(value), class_="tick", x=LEFT - 7, y=at + 3.5, text_anchor="end")
        for value in x_ticks:
            body += tag(
                "text", short(value), class_="tick", x=self.x(value), y=self.bottom + 15, text_anchor="middle"
            )
        body += tag(
            "text", text(x_name), class_="name", x=(LEFT + right) / 2, y=self.height - 6, text_anchor="middle"
        )
        return body + tag("line", class_="axis", x1=LEFT, x2=right, y1=self.bottom, y2=self.bottom)

    def mark(self, x: float, label: str, row: int = 0) -> str:
        """A dashed vertical line at pixel `x` with its name at the top, `row` lines down."""
        name = tag("text", text(label), class_="value", x=x - 5, y=TOP + 9 + 13 * row, text_anchor="end")
        return tag("line", class_="mark", x1=x, x2=x, y1=TOP, y2=self.bottom) + name

    def marks(self, series: Series, values: Sequence[tuple[float, float]]) -> str:
        """A circle per value."""
        card = "var(--card)"
        fill, edge = (card, series.color) if series.hollow else (series.color, card)
        return "".join(
            tag(
                "circle",
                cx=self.x(a),
                cy=self.y(b),
                r=4.5,
                fill=fill,
                stroke=edge,
                stroke_width=2,
                title=f"{series.name}: {short(b)} at {short(a)}",
            )
            for a, b in values
        )

    def line(self, series: Series, values: Sequence[tuple[float, float]]) -> str:
        """The values joined; nothing where there are none."""
        if not values:
            return ""
        return tag(
            "polyline",
            points=" ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in values),
            fill="none",
            stroke=series.color,
            class_="faint" if series.faint else "line",
            title=series.name,
        )


def lines(
    series: Sequence[Series],
    x_name: str,
    *,
    width: int = HALF,
    height: int = HEIGHT,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Lines and marks over a common x axis. `y_range` widens the values' own range, never cuts it."""
    kept = [
        (s, [(x, y) for x, y in s.values if y is not None and math.isfinite(y) and (y > 0 or not log_y)])
        for s in series
    ]
    points = [point for _, values in kept for point in values]
    if not points:
        return empty("nothing measured yet", width, height)
    xs, ys = [p[0] for p in points], [p[1] for p in points] + list(y_range or ())
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    low, high = _with_margin(min(ys), max(ys), log_y, fixed=y_range is not None)
    plot = Plot.over(width, height, (x_low, x_high), (low, high), "y" if log_y else "")
    x_ticks = ticks(x_low, x_high, 6, whole=all(isinstance(x, int) for x in xs))
    body = plot.axes(x_ticks, log_ticks(low, high) if log_y else ticks(low, high), x_name)
    for s, values in kept:
        body += plot.marks(s, values) if s.points or len(values) == 1 else plot.line(s, values)
    return figure(width, height, body, ", ".join(s.name for s in series))


def _with_margin(low: float, high: float, log: bool, fixed: bool) -> tuple[float, float]:
    """The y axis of values within [low, high]: from 0 where that is near; as it is if `fixed`."""
    if log:
        return low / 1.5, high * 1.5
    if fixed:
        return low, high
    pad = (high - low or abs(high) or 1.0) * 0.06
    return (0.0 if 0 <= low <= (high - low) * 0.5 else low - pad), high + pad


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(name, colour) pairs, as HTML."""
    return tag(
        "div",
        "".join(tag("span", f'<i style="background:{color}"></i>{text(name)}') for name, color in entries),
        class_="legend",
    )


def percent(share: float) -> str:
    """A share in [0, 1] as a percentage, with one decimal below 10%."""
    return f"{share * 100:.0f}%" if share >= 0.0995 or share == 0 else f"{share * 100:.1f}%"


def share_bars(counts: Sequence[tuple[int, int]], color: str, x_name: str, bound: int | None = None) -> str:
    """A bar per (whole number, count): its share of all. `bound`, the maximum, is a line beside its bar."""
    total = sum(n for _, n in counts)
    if not total:
        return empty("no trajectories stored")
    low, high = min(k for k, _ in counts), max(max(k for k, _ in counts), bound if bound is not None else 0)
    top = max(n for _, n in counts) / total * 1.12
    plot = Plot.over(THIRD, HEIGHT, (low - 0.6, high + 0.6), (0, top))
    body = plot.axes(list(range(low, high + 1, max(1, (high - low) // 12))), ticks(0, top), x_name, percent)
    half = min(60.0, (plot.x(1) - plot.x(0)) * 0.36)
    for value, n in counts:
        share, y = n / total, plot.y(n / total)
        title = f"{value}: {n} trajectories, {percent(share)}"
        body += tag(
            "rect",
            x=plot.x(value) - half,
            y=y,
            width=2 * half,
            height=max(0.0, plot.bottom - y),
            fill=color,
            rx=2,
            title=title,
        )
        body += tag("text", percent(share), class_="value", x=plot.x(value), y=y - 4, text_anchor="middle")
    if bound is not None:
        body += plot.mark(plot.x(bound + 0.5), "bound")
    return figure(THIRD, HEIGHT, body, x_name)


def shares(values: Sequence[int], edges: Sequence[int]) -> list[float]:
    """The share of `values` in each [edge, next edge)."""
    ordered = sorted(values)
    places = [bisect_left(ordered, edge) for edge in edges]
    return [(after - before) / len(ordered) for before, after in pairwise(places)]


def log_histogram(
    groups: Sequence[tuple[str, str, Sequence[int]]], x_name: str, marks: Sequence[tuple[float, str]] = ()
) -> str:
    """Shares of positive whole numbers over a log axis: groups of (name, colour, values), the first filled,
    further ones as outlines."""
    groups = [(name, color, [max(1, v) for v in values]) for name, color, values in groups if values]
    if not groups:
        return empty("no trajectories stored")
    longest = max(max(values) for *_, values in groups)
    # about evenly spaced on the axis
    edges = sorted({round((longest + 1) ** (i / _BINS)) for i in range(_BINS + 1)} | {1, longest + 1})
    heights = [shares(values, edges) for *_, values in groups]
    top = max(map(max, heights)) * (1.12 + 0.1 * len(marks))
    plot = Plot.over(THIRD, HEIGHT, (edges[0], edges[-1]), (0, top), "x")
    body = plot.axes(log_ticks(edges[0], edges[-1]), ticks(0, top, 4), x_name, percent)
    for index, ((name, color, _), parts) in enumerate(zip(groups, heights, strict=True)):
        tops = [(edge, part) for pair, part in zip(pairwise(edges), parts, strict=True) for edge in pair]
        corners = [(edges[0], 0.0), *tops, (edges[-1], 0.0)]
        outline = " ".join(f"{plot.x(edge):.1f},{plot.y(part):.1f}" for edge, part in corners)
        opacity = 0.5 if index == 0 else 0.12
        body += tag(
            "polyline",
            points=outline,
            fill=color,
            fill_opacity=opacity,
            stroke=color,
            class_="line",
            title=name,
        )
    body += "".join(plot.mark(plot.x(max(1, value)), label, row) for row, (value, label) in enumerate(marks))
    return figure(THIRD, HEIGHT, body, x_name)


def stacked_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], label_width: int = 130) -> str:
    """One horizontal bar per (name, parts), each part (kind, seconds, colour) as its share of the row."""
    width, row, bar, body = 1140, 30, 22, ""
    for index, (name, parts) in enumerate(rows):
        top, at = index * row + 2, float(label_width)
        total = sum(seconds for _, seconds, _ in parts)
        body += tag("text", text(name), class_="row", x=label_width - 10, y=top + 15, text_anchor="end")
        for kind, seconds, color in parts:
            length = (width - label_width - 4) * seconds / total if total else 0.0
            share = f"{kind} {percent(seconds / total)}" if total else kind
            body += tag(
                "rect", x=at, y=top, width=length, height=bar, fill=color, title=f"{share}, {seconds:.1f} s"
            )
            if length > 6.5 * len(share) + 8:
                on = "on-light" if color in ("var(--none)", "var(--wait)") else "inside"
                body += tag(
                    "text", text(share), class_=on, x=at + length / 2, y=top + 15, text_anchor="middle"
                )
            at += length
    return figure(width, max(len(rows) * row + 4, 1), body, "where the time went")
