"""The page and the table of a sweep, with the charts of report/ and a live run's time line."""

from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.machine.observability import console
from laminar_hpc.machine.observability.trace import KINDS, TraceSpan
from laminar_hpc.report import svg, timeline
from laminar_hpc.report.page import figure, grid, keys, page, section, tiles
from laminar_hpc.report.rundata import Run, RunLaunch
from laminar_hpc.report.svg import Series, tag, text
from laminar_hpc.simulator.run import SimulationOutcome

PALETTE = tuple(
    f"var(--{kind})" for kind in ("generate", "train", "pull", "publish", "score", "evaluate", "checkpoint")
)
_LIKE = {  # the colours of causes that are no kind of span
    **{"prefill": "evaluate", "exchange": "publish", "move": "send", "environment": "score"},
    **{"barrier": "wait", "weights": "load", "admission": "none", "down": "bad"},
}
CAUSES = {
    cause: f"var(--{_LIKE.get(cause, cause)})"
    for cause in (*_LIKE, "generate", "train", "pull", "publish", "checkpoint", "wait")
}
COLUMNS = (
    ("pipeline", "pipeline", "{}"),
    ("gpus", "GPUs", "{}"),
    ("trainer_gpus", "train", "{}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("tokens_per_second_low", "low", "{:,.0f}"),
    ("tokens_per_second_high", "high", "{:,.0f}"),
    ("step_seconds", "step s", "{:,.0f}"),
    ("trainer_wait_share", "trainer waits", "{:.0%}"),
    ("rollout_idle_share", "rollouts idle", "{:.0%}"),
    ("kv_use", "KV use", "{:.0%}"),
    ("latency_mean", "latency s", "{:,.0f}"),
    ("latency_max", "max", "{:,.0f}"),
    ("staleness_training_mean", "staleness", "{:.1f}"),
    ("staleness_training_max", "max", "{}"),
)


def cells(row: dict) -> list[str]:
    """The texts of one row, by column."""
    values = {**row["outcome"].figures, "pipeline": row["pipeline"], "gpus": row["gpus"]}
    return [form.format(values[key]) for key, _, form in COLUMNS]


def table(rows: Sequence[dict]) -> str:
    return "\n".join(console.table([[name for _, name, _ in COLUMNS], *map(cells, rows)]))


def as_json(rows: Sequence[dict]) -> list[dict]:
    """Per row all figures, GPU-seconds by role and cause, and staleness counts."""
    others = ("gpu_seconds", "staleness_generation", "staleness_training")
    return [
        {"pipeline": row["pipeline"], "gpus": row["gpus"], **row["outcome"].figures}
        | {key: getattr(row["outcome"], key) for key in others}
        for row in rows
    ]


def document(name: str, settings: dict, rows: Sequence[dict]) -> str:
    """The page of a sweep, one row per simulated point."""
    largest = max(row["gpus"] for row in rows)
    at_largest = [row for row in rows if row["gpus"] == largest]
    best = max(at_largest, key=lambda row: row["outcome"].figures["tokens_per_second"])
    names = list(dict.fromkeys(row["pipeline"] for row in rows))
    color = {pipeline: PALETTE[i % len(PALETTE)] for i, pipeline in enumerate(names)}
    head = tag("header", tag("h1", text(name)) + tag("p", "simulated; no GPU was used"))
    f = best["outcome"].figures
    base = at_largest[0]["outcome"].figures["tokens_per_second"]
    rate, first = f["tokens_per_second"], at_largest[0]["pipeline"]
    staleness = f"{f['staleness_training_mean']:.1f} / {f['staleness_training_max']}"
    headline = tiles(
        [
            (f"fastest at {largest:,} GPUs", best["pipeline"], f"{f['trainer_gpus']} train"),
            ("tokens per second", console.count(rate), f"{rate / base:.2f} x {first}"),
            ("KV use", f"{f['kv_use']:.0%}", f"rollouts idle {f['rollout_idle_share']:.0%}"),
            ("staleness at training", staleness, "mean / max"),
        ]
    )
    charts = _scales(rows, names, color) + _spent(rows) + _time(best) + _histograms(at_largest, color)
    return page(f"{name}: laminar sim", head + headline + charts + _settings(settings))


def _scales(rows: Sequence[dict], names: Sequence[str], color: dict[str, str]) -> str:
    def series(key: str) -> list[Series]:
        points: dict[str, list[tuple[float, float | None]]] = {name: [] for name in names}
        for row in rows:
            points[row["pipeline"]].append((row["gpus"], row["outcome"].figures[key]))
        return [Series(name, color[name], points[name]) for name in names]

    head = svg.row(*(title for _, title, _ in COLUMNS), cell="th")
    body = "".join(svg.row(*cells(row)) for row in rows)
    charts = grid(
        "two",
        figure("tokens per second", svg.lines(series("tokens_per_second"), "GPUs", log_y=True)),
        figure("KV use of the replicas", svg.lines(series("kv_use"), "GPUs", y_range=(0.0, 1.0))),
    )
    return section(
        "Pipelines and scales", svg.legend(list(color.items())) + charts + tag("table", head + body)
    )


def _spent(rows: Sequence[dict]) -> str:
    bars = []
    for row in rows:
        parts = [
            ("trainer waits" if (role, cause) == ("trainer", "wait") else cause, seconds, color)
            for role, causes in row["outcome"].gpu_seconds.items()
            for cause, seconds in causes.items()
            if seconds > 0 and (color := CAUSES.get(cause, "var(--none)"))
        ]
        bars.append((f"{row['pipeline'][:14]} {row['gpus']}", parts))
    return section(
        "Where each GPU-second went",
        svg.stacked_bars(bars, label_width=190),
        "After the warm-up; rollouts first, then the trainer.",
    )


def _time(row: dict) -> str:
    """The time line of the first replicas and the trainer, and the KV use over time."""
    outcome: SimulationOutcome = row["outcome"]
    spans = {}
    for name, recorded in outcome.spans.items():
        process = name if name != "trainer" else "trainer0"
        spans[process] = [
            TraceSpan(k, a, b, {}) if k in KINDS else TraceSpan("wait", a, b, {"cause": k})
            for k, a, b in recorded
        ]
    end = outcome.figures["seconds"]
    run = Run(Path("."), {}, [RunLaunch(0.0, end, -1, row["pipeline"], {})], [], 0, {}, spans, [])
    samples = outcome.kv_samples[:: max(1, len(outcome.kv_samples) // 400)]
    kv = svg.lines([Series("KV use", "var(--generate)", samples)], "seconds", width=1140, y_range=(0.0, 1.0))
    title = f"Time line: {row['pipeline']} on {row['gpus']} GPUs"
    return section(title, timeline.figures(run, end / 6) + figure("KV use, mean over all replicas", kv))


def _histograms(rows: Sequence[dict], color: dict[str, str]) -> str:
    charts = []
    for row in rows:
        name, counts = row["pipeline"], list(row["outcome"].staleness_training.items())
        chart = svg.share_bars(counts, color[name], "trainer steps")
        charts.append(figure(f"{name}: staleness at training", chart))
    lengths = svg.log_histogram(
        [("response", "var(--generate)", rows[0]["outcome"].lengths)], "response tokens"
    )
    return section("Staleness and lengths", grid("three", *charts, figure("lengths", lengths)))


def _settings(settings: dict) -> str:
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
    return section("Settings", keys(flat))
