"""The report's frame: HTML, style (page.css) and the one script (page.js: zoom of the time line), all inline:
the page loads nothing.

Colours are CSS variables with a light and a dark set, chosen by the reader's system.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar_hpc.report.svg import THIRD, Series, lines, tag, text

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")


def page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>\n{STYLE}</style></head><body><main>{body}</main><script>\n{SCRIPT}</script></body></html>\n"
    )


def section(title: str, content: str, note: str = "") -> str:
    """A card with a heading; `content` is HTML."""
    return tag(
        "section", tag("h2", text(title)) + (tag("p", text(note), class_="note") if note else "") + content
    )


def figure(title: str, chart: str, legend: str = "") -> str:
    """A chart under its title; `chart` and `legend` are markup."""
    return tag("figure", tag("h3", text(title)) + legend + chart)


def chart(title: str, series: Sequence[Series], x_name: str = "trainer step", **options: Any) -> str:
    """Lines under their title, of the width of one in three; `options` as those of svg.lines."""
    return figure(title, lines(series, x_name, **{"width": THIRD, **options}))


def grid(columns: str, *figures: str) -> str:
    """Figures side by side; `columns`: two or three."""
    return tag("div", "".join(figures), class_=columns)


def tiles(values: list[tuple[str, str, str]]) -> str:
    """Headline numbers: (name, value, what goes with it)."""
    parts = (
        tag("span", text(name)) + tag("b", text(value)) + tag("span", text(more))
        for name, value, more in values
    )
    return tag("div", "".join(tag("div", part, class_="tile") for part in parts), class_="tiles")


def keys(values: Mapping[str, object]) -> str:
    """Names and values in columns."""
    return tag(
        "div",
        "".join(tag("div", tag("span", text(k)) + tag("b", text(v))) for k, v in values.items()),
        class_="keys",
    )
