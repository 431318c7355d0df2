"""run_dir/report.html: one self-contained page about a run, made from its files alone; also `laminar report
RUN_DIR`.

Written at the end of every run and again on demand; works for running, crashed, resumed and replayed runs,
and leaves out what their files do not hold. The figures are those of `summary`; docs/metrics.md says what
each means.
"""

import statistics
import time
from argparse import Namespace
from pathlib import Path

from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.machine.observability.console import count, duration, number
from laminar_hpc.report import forecast, rundata, sections, summary
from laminar_hpc.report.page import page, tiles
from laminar_hpc.report.rundata import Run
from laminar_hpc.report.svg import tag, text

_FORECAST_SECONDS = 30.0  # that a page waits for a forecast
Tile = tuple[str, str, str]  # title, value, note


def write(run: Run) -> Path:
    """Writes report.html of a loaded run in one piece; returns its path."""
    path = run.directory / "report.html"
    write_whole(path, document(run))
    return path


def main(options: Namespace) -> int:
    """`laminar report RUN_DIR`: makes summary.json and report.html anew and prints where the report lies.
    Gives the exit code.

    Raises LaminarError for what is no run."""
    run = rundata.load(Path(options.words[0]))
    forecast.make(run.directory, _FORECAST_SECONDS)
    summary.write(run)
    print(write(run))
    return 0


def document(run: Run) -> str:
    """The page of a loaded run."""
    figures = summary.figures(run)
    body = header(run, figures) + headline(run, figures) + "".join(part(run) for part in sections.ALL)
    return page(f"{run.directory.resolve().name}: laminar report", body)


def header(run: Run, figures: dict) -> str:
    """The page's first lines: the run's name, how it ended, its pipeline and steps."""
    launch = run.launches[-1] if run.launches else None
    reason = launch.reason if launch else ""
    wanted = run.config.get("steps")
    state = f"ended: {reason}"
    if not reason:
        state = f"no end recorded after step {figures['steps']}: still going, or cut off"
    started = "never started"
    if run.launches:
        started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.launches[0].start))
    facts = [
        f"pipeline {figures['pipeline'] or 'unknown'}",
        f"step {figures['steps']}" + (f" of {wanted}" if wanted else ""),
        started,
    ]
    if str(run.config.get("source", "")).startswith("replay:"):
        facts.append(f"trained again from {run.config['source'].removeprefix('replay:')}")
    good = "good" if reason and not reason.startswith("failed") else "bad"
    badge = tag("span", text(state), class_=f"state {good}")
    title = tag("h1", text(run.directory.resolve().name))
    return tag("header", title + badge + tag("p", text("  ·  ".join(facts))))


def headline(run: Run, f: dict) -> str:
    """The tiles under the page's header."""
    return tiles([*_learning(run, f), *_staleness(run, f), *_time_lost(f)])


def _learning(run: Run, f: dict) -> list[Tile]:
    sampled, trained = f["accuracy_after_sampled"], f["trajectories_trained"]
    reached = f["trajectories_to_070"]
    seconds = [step["seconds"] for step in run.steps]
    return [
        (
            "held-out accuracy (greedy)",
            f"{number(f['accuracy_before'])} → {number(f['accuracy_after'])}",
            "" if sampled is None else f"sampled, after: {number(sampled)}",
        ),
        (
            "trajectories trained",
            "-" if trained is None else f"{trained:,}",
            f"accuracy 0.70 after {reached:,}" if reached else "accuracy 0.70 not reached",
        ),
        (
            "wall time",
            duration(f["wall_seconds"]),
            f"{duration(statistics.median(seconds))} per step (median)" if seconds else "no step done",
        ),
        ("tokens per second", count(f["tokens_per_second"]), "batch over time between updates"),
    ]


def _staleness(run: Run, f: dict) -> list[Tile]:
    bound = (run.config.get("pipeline") or {}).get("max_staleness")
    return [
        (
            "staleness at training",
            f"{number(f['staleness_training_mean'], 2)} / {number(f['staleness_training_max'], 0)}",
            "mean / max, " + ("no bound" if bound is None else f"bound {bound}"),
        ),
        (
            "versions per trajectory",
            str(f["max_versions_per_trajectory"] or "-"),
            "the maximum over the trajectories trained",
        ),
    ]


def _time_lost(f: dict) -> list[Tile]:
    shown = [
        (
            "trainer idle",
            _share(f["trainer_idle_fraction"]),
            f"rollouts idle {_share(f['rollout_idle_fraction'])}",
        ),
        (
            "publishing holds up",
            duration_ms(f["publish_stall_seconds_mean"]),
            f"a pull takes {duration_ms(f['pull_seconds_mean'])}",
        ),
    ]
    if f["replicas_told_to_end"]:
        kept = f"{count(f['tokens_parked'])} tokens parked ({count(f['bytes_parked'])} bytes), "
        kept += f"{count(f['parked_tokens_taken_up'])} taken up, {count(f['tokens_discarded'] or 0)} lost"
        if again := f["parked_trajectories_prefilled"]:
            kept += f"; {again:,} trajectories prefilled again, as their caches were gone"
        shown.append(("replicas taken back", f"{f['replicas_told_to_end']:,}", kept))
    if f["publish_changed_fraction_mean"] is not None:
        sent = f"{_share(f['publish_bytes_over_full_mean'])} of the bytes of full copies were sent"
        shown.append(("weights changed per step", _share(f["publish_changed_fraction_mean"]), sent))
    return shown


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f}%"


def duration_ms(seconds: float | None) -> str:
    """Milliseconds below one second."""
    return f"{seconds * 1000:.0f} ms" if seconds is not None and seconds < 0.9995 else duration(seconds)
