"""Writes the plots of docs/simulator-validation.md as SVG files, from what `python bench/simulator.py
--json` has written.

    python docs/make_simulator_plots.py docs/benchmarks/simulator.json

simulator-dora.svg         published and simulated tokens/s, row by row
simulator-speedup.svg      Laminar's speed-up against GPUs
simulator-sensitivity.svg  what a standard deviation less and more of a constant does to each headline: the
constants that matter most, if it was made
"""

import json
import re
import sys
from pathlib import Path

from laminar_hpc.report.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Plot,
    figure,
    percent,
    scale,
    short,
    tag,
    text,
    ticks,
)

IMAGES = Path(__file__).with_name("images")
STYLE = (
    "svg{background:#fff} text{font-family:system-ui,sans-serif;font-size:11.5px;fill:#5d6675} "
    ".row{font-size:12.5px;fill:#1d2330} "
    ".grid{stroke:#e3e6eb} .axis{stroke:#5d6675} .line{fill:none;stroke-width:2}"
)
PUBLISHED, SIMULATED, LESS, MORE = "#cfd4dc", "#3f78c9", "#e2673b", "#3d9a62"
COLOURS = {"sync": "#e2673b", "one_step": "#3f78c9", "stream": "#3d9a62", "partial": "#a44fb0"}
SHOWN = 6  # constants per headline
LABELS = 250  # pixels for the names of rows


def legend(entries: list[tuple[str, str]], x: float, y: float, step: float = 130) -> str:
    """(name, colour) pairs in a line."""
    body = ""
    for i, (name, colour) in enumerate(entries):
        body += tag("rect", x=x + i * step, y=y - 9, width=10.0, height=10.0, rx=2, fill=colour)
        body += tag("text", text(name), x=x + i * step + 15, y=y)
    return body


def dora(rows: list[dict]) -> str:
    """Two bars per row of DORA's table."""
    compared = [row for row in rows if row["part"] == "dora"]
    x = scale(0.0, 1.12 * max(max(row["published"], row["simulated"]) for row in compared), 190, 640)
    body = legend([("published", PUBLISHED), ("simulated", SIMULATED)], 190, 16)
    for i, row in enumerate(compared):
        top = 30.0 + 40 * i
        body += tag(
            "text",
            text(row["what"].replace("_", " ") + " GPUs"),
            class_="row",
            x=180,
            y=top + 20,
            text_anchor="end",
        )
        for j, (key, colour) in enumerate((("published", PUBLISHED), ("simulated", SIMULATED))):
            end = x(row[key])
            body += tag("rect", x=190, y=top + 15 * j, width=end - 190, height=13, rx=2, fill=colour)
            body += tag(
                "text",
                f"{row[key]:,.0f}" + (f" ({row['error']:+.0%})" if j else ""),
                x=end + 5,
                y=top + 15 * j + 11,
            )
    return figure(760, 34 + 40 * len(compared), body, "DORA's table, tokens/s")


def speedup(rows: list[dict]) -> str:
    """A line per model and pipeline over GPUs, log axis."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        match = re.fullmatch(r"(\d+B) (\d+): over (\w+)", row["what"])
        if row["part"] == "headline" and match:
            points.setdefault((match[1], match[3]), []).append((int(match[2]), row["simulated"]))
    every = [point for line in points.values() for point in line]
    gpus = [n for n, _ in every]
    width, height = 760, 340
    top = max(ratio for _, ratio in every) * 1.08
    plot = Plot(
        width,
        height,
        scale(min(gpus), max(gpus), LEFT, width - RIGHT - 40, log=True),
        scale(0.0, top, height - BOTTOM, TOP + 14),
    )
    body = plot.axes(sorted(set(gpus)), ticks(0.0, top), "GPUs", short)
    body += legend(
        [(f"over {name.replace('_', '-')}", colour) for name, colour in COLOURS.items()], LEFT + 12, 14
    )
    for (model, name), line in points.items():
        path = " ".join(f"{plot.x(n):.1f},{plot.y(ratio):.1f}" for n, ratio in sorted(line))
        body += tag("polyline", points=path, class_="line", stroke=COLOURS[name])
        for n, ratio in line:
            body += tag(
                "circle",
                cx=plot.x(n),
                cy=plot.y(ratio),
                r=3.5,
                fill=COLOURS[name],
                title=f"{model}, {n} GPUs: {ratio:.2f}",
            )
        if name == "sync":
            n, ratio = max(line)
            body += tag("text", model, x=plot.x(n) + 6, y=plot.y(ratio) + 4)
    return figure(width, height, body, "Laminar's speed-up against GPUs")


def sensitivity(rows: list[dict]) -> str:
    """A tornado per headline."""
    swings: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        if row["part"] == "sensitivity":
            constant, factor, name = re.fullmatch(r"(\w+) x ([\d.]+): (.*)", row["what"]).groups()
            swings.setdefault(name, {}).setdefault(constant, {})[float(factor)] = row["error"]
    largest = max(
        abs(value) for pairs in swings.values() for pair in pairs.values() for value in pair.values()
    )
    x = scale(-largest, largest, LABELS, 740)
    body, y = legend([("constant lower", LESS), ("higher", MORE)], LABELS, 16), 40.0
    for name, pairs in swings.items():
        body += tag("text", text(name), class_="row", x=8, y=y + 4, font_weight="bold")
        y += 12
        for constant, pair in sorted(pairs.items(), key=lambda item: -max(map(abs, item[1].values())))[
            :SHOWN
        ]:
            body += tag("text", constant, x=LABELS - 8, y=y + 10, text_anchor="end")
            for j, (factor, colour) in enumerate(zip(sorted(pair), (LESS, MORE), strict=True)):
                a, b = sorted((x(0.0), x(pair[factor])))
                title = f"{constant} x {factor}: {pair[factor]:+.1%}"
                body += tag("rect", x=a, y=y + 6 * j, width=b - a, height=5, fill=colour, title=title)
            y += 16
        y += 16
    bars = "".join(
        tag("line", class_="grid", x1=x(v), x2=x(v), y1=26, y2=y - 12)
        + tag("text", percent(abs(v)) if v >= 0 else "-" + percent(-v), x=x(v), y=y, text_anchor="middle")
        for v in ticks(-largest, largest, 8)
    )
    return figure(760, int(y) + 10, bars + body, "Sensitivity of each headline")


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())["rows"]
    IMAGES.mkdir(exist_ok=True)
    charts = {
        "dora": ("dora", dora),
        "headline": ("speedup", speedup),
        "sensitivity": ("sensitivity", sensitivity),
    }
    there = {row["part"] for row in rows}
    for name, chart in (charts[part] for part in charts if part in there):
        markup = chart(rows).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        markup = markup.replace(">", f">{tag('style', STYLE)}", 1)
        (IMAGES / f"simulator-{name}.svg").write_text(markup + "\n")


if __name__ == "__main__":
    main()
