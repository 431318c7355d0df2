"""The sections of a run's report, in the order of the page: each a function from the run to HTML, empty where
the run's files do not hold what it shows."""

import statistics
import time
from collections import Counter
from collections.abc import Callable

from laminar_hpc.machine.observability.console import duration, value_text
from laminar_hpc.report import forecast, replicas, rewards, samples, summary, svg, timeline, turns
from laminar_hpc.report.page import chart, figure, grid, keys, section
from laminar_hpc.report.rundata import Run
from laminar_hpc.report.svg import Series, tag

BLUE, ORANGE, GREEN = "var(--generate)", "var(--train)", "var(--pull)"
PURPLE, GREY = "var(--publish)", "var(--soft)"


def learning(run: Run) -> str:
    """Accuracy and reward over steps and over time."""
    clock = timeline.RunTime(run)
    charts = []
    first, *others = summary.files(run) or [""]
    own_reward = any(s["reward_mean"] != s["accuracy_mean"] for s in run.steps)
    axes: list[tuple[str, str, Callable[[dict], float]]] = [
        ("by trainer step", "trainer step", lambda record: record["step"]),
        ("by time", "minutes since the start", lambda record: clock(record["time"]) / 60),
    ]
    for title, x_name, place in axes:
        steps = [(place(s), s) for s in run.steps]
        accuracy = [s["accuracy_mean"] for s in run.steps]
        smooth = [(x, statistics.fmean(accuracy[max(0, i - 2) : i + 1])) for i, (x, _) in enumerate(steps)]
        series = [
            *(
                [Series("reward of the batch", GREY, [(x, s["reward_mean"]) for x, s in steps], faint=True)]
                if own_reward
                else []
            ),
            Series("accuracy of the batch", BLUE, [(x, s["accuracy_mean"]) for x, s in steps], faint=True),
            Series("accuracy, mean of 3 steps", BLUE, smooth),
            *held_out(run, first, place),
        ]
        charts.append(shares(title, series, x_name))
    if by_weights := accuracy_by_weight_id(run):
        series = [Series("accuracy", BLUE, by_weights)]
        charts.append(
            shares("by the weights that generated", series, "weight id; the newest are not all trained")
        )
    names = [
        ("batch accuracy and its mean of 3 steps", BLUE),
        ("batch reward" + ("" if own_reward else ": equal to its accuracy"), GREY),
        (f"held-out {first}: filled greedy, hollow sampled", ORANGE),
    ]
    for file in others:
        series = held_out(run, file, lambda e: e["step"])
        charts.append(shares(f"held-out {file}: filled greedy, hollow sampled", series, "trainer step"))
    return section("Accuracy and reward", svg.legend(names) + grid("three", *charts))


def shares(title: str, series: list[Series], x_name: str) -> str:
    """A chart of figures between 0 and 1."""
    return chart(title, series, x_name, y_range=(0.0, 1.0))


def accuracy_by_weight_id(run: Run) -> list[tuple[float, float]]:
    """(weight id, mean accuracy) of all that was trained of it, in whichever steps."""
    counts, sums = Counter[int](), Counter[int]()
    for step in run.steps:
        for weight_id, trajectories, accuracy in step.get("accuracy_by_weight_id", []):
            counts[weight_id] += trajectories
            sums[weight_id] += trajectories * accuracy
    return [(weight_id, sums[weight_id] / counts[weight_id]) for weight_id in sorted(counts)]


def held_out(run: Run, file: str, place: Callable[[dict], float]) -> list[Series]:
    """A file's evaluations: greedy filled, sampled hollow."""
    points: dict[str, list[tuple[float, float]]] = {"sampled": [], "greedy": []}
    for e in run.evaluations:
        if e.get("file", "") == file and e["name"] in points:
            points[e["name"]].append((place(e), e["accuracy"]))
    return [
        Series(f"{file}, sampled", ORANGE, points["sampled"], points=True, hollow=True),
        Series(f"{file}, greedy", ORANGE, points["greedy"], points=True),
    ]


def staleness(run: Run) -> str:
    """Staleness in trainer steps: both distributions, and their means over the steps."""
    setting = (run.config.get("pipeline") or {}).get("max_staleness")
    bound = setting if isinstance(setting, int) else None  # one that adapts is no line of the chart
    generation = sorted(Counter(t.staleness_generation for t in run.consumed).items())
    training = sorted(Counter(t.staleness_training for t in run.consumed).items())
    over_time = [
        Series("at training", ORANGE, run.over_steps("staleness_training_mean")),
        Series("at generation", BLUE, run.over_steps("staleness_generation_mean")),
    ]
    charts = grid(
        "three",
        figure("when the last token was generated", svg.share_bars(generation, BLUE, "trainer steps")),
        figure("when it was trained on", svg.share_bars(training, ORANGE, "trainer steps", bound)),
        chart("mean per batch: the same two", over_time),
    )
    note = (
        "Trainer steps between the weights that generated a trajectory and the trainer's own, as shares "
        f"of {run.of_consumed}."
    )
    return section("Staleness", charts, note)


def lengths(run: Run) -> str:
    """Response lengths in tokens: distribution, change over the run, longest and mean per step."""
    everything = [t.response_length for t in run.consumed]
    third = len(everything) // 3
    marks = []
    if len(everything) > 1:
        cuts = statistics.quantiles(everything, n=100, method="inclusive")
        marks = [(cuts[49], f"median {cuts[49]:.0f}"), (cuts[98], f"99th percentile {cuts[98]:.0f}")]
    first, last = everything[:third], everything[-third:] if third else []
    over_time = [
        Series("longest", GREY, run.over_steps("response_length_max"), faint=True),
        Series("mean", BLUE, run.over_steps("response_length_mean")),
    ]
    thirds = [("first third", ORANGE, first), ("last third", BLUE, last)]
    everywhere = svg.log_histogram([("all", BLUE, everything)], "response tokens", marks)
    charts = grid(
        "three",
        figure(run.of_consumed, everywhere),
        figure("first third (orange), last third (blue)", svg.log_histogram(thirds, "response tokens")),
        chart("per batch: mean (blue) and longest", over_time),
    )
    return section("Response lengths", charts)


def time_line(run: Run) -> str:
    """What every process did when; empty without traces."""
    content = timeline.figures(run)
    return section("Every process over time", content) if content else ""


def accounts(run: Run) -> str:
    """Each process's seconds by kind; empty without traces."""
    rows = timeline.accounts(run)
    if not rows:
        return ""
    body = ""
    for name, parts in rows:
        listed = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds, _ in parts)
        body += svg.row(name, listed)
    details = tag("details", tag("summary", "in seconds") + tag("table", body))
    return section(
        "Where the time went",
        svg.stacked_bars(rows) + details,
        "From the first batch taken to the last step done.",
    )


def sampling(run: Run) -> str:
    """Groups filtered and tokens saved, where a run did either."""
    steps = [s for s in run.steps if s.get("tokens_generated") is not None]
    if not any(s["groups_filtered"] or s["tokens_saved"] for s in steps):
        return ""
    groups = [Series("filtered", ORANGE, [(s["step"], s["groups_filtered"]) for s in steps])]
    tokens = [
        Series("generated", BLUE, [(s["step"], s["tokens_generated"]) for s in steps]),
        Series("saved", GREEN, [(s["step"], s["tokens_saved"]) for s in steps]),
    ]
    charts = grid(
        "two",
        chart("groups filtered, per step: all rewards equal", groups, y_range=(0.0, 0.0), width=svg.HALF),
        chart(
            "response tokens per step: generated (blue), saved (green)",
            tokens,
            y_range=(0.0, 0.0),
            width=svg.HALF,
        ),
    )
    note = (
        "Saved: the samples that groups did without, against always the most, at the mean length of their "
        "own responses."
    )
    return section("Sampling", charts, note)


def trainer_curves(run: Run) -> str:
    """Loss, gradient norm and the like per trainer step."""
    if not run.steps:
        return ""

    def curve(title: str, *fields: tuple[str, str]) -> str:
        series = [Series(field.replace("_", " "), color, run.over_steps(field)) for field, color in fields]
        return chart(title, series, height=190)

    replayed = any("routing_difference" in step for step in run.steps)
    routes = curve("routes that the trainer's router would not choose (share)", ("routing_difference", BLUE))
    charts = grid(
        "three",
        curve("entropy per token (nats)", ("entropy", BLUE)),
        curve("gradient norm", ("grad_norm", BLUE)),
        curve("loss", ("loss", BLUE)),
        curve("share of clipped tokens", ("clip_fraction", BLUE)),
        curve("largest importance ratio", ("ratio_max", BLUE)),
        curve(
            "seconds per step: training (orange), waiting", ("wait_seconds", GREY), ("train_seconds", ORANGE)
        ),
        *([routes] if replayed else []),
    )
    return section("Trainer", charts)


def guard(run: Run) -> str:
    """What the divergence guard has left out and skipped; empty where it did neither."""
    steps = [s for s in run.steps if s.get("guard_left_out") or s.get("guard_skipped_updates")]
    if not steps:
        return ""
    left, skipped = (
        Series(name, color, run.over_steps(field), points=True)
        for name, color, field in (
            ("left out", ORANGE, "guard_left_out"),
            ("skipped", PURPLE, "guard_skipped_updates"),
        )
    )
    charts = grid(
        "two",
        chart("trajectories left out, per step", [left], y_range=(0.0, 0.0), width=svg.HALF),
        chart("updates skipped, per step", [skipped], y_range=(0.0, 0.0), width=svg.HALF),
    )
    return section("Divergence guard", charts, "Steps: " + ", ".join(str(s["step"]) for s in steps) + ".")


def weights(run: Run) -> str:
    """How long weights took on their way, and how far trainer and engine differ; empty without either."""
    mismatches, pulls = run.records.get("logprob_mismatch", []), run.records.get("pull", [])
    if not mismatches and not pulls:
        return ""
    mismatch = [
        Series(name, color, [(g["weight_id"], g[name]) for g in mismatches])
        for name, color in (("max", GREY), ("mean", BLUE))
    ]
    stalls = [(p["weight_id"], p["stall_seconds"]) for p in run.records.get("publish", [])]
    seconds = [(p["weight_id"], p["seconds"]) for p in pulls]
    pulled = Series("pull", GREEN, seconds, points=len({p["replica"] for p in pulls}) > 1)
    published = Series("stall of the trainer", PURPLE, stalls)
    charts = grid(
        "three",
        chart("log-prob mismatch: mean (blue) and largest", mismatch, "weight id", log_y=True),
        chart("seconds the trainer stood still to publish", [published], "weight id", y_range=(0.0, 0.0)),
        chart("seconds of a replica's pull", [pulled], "weight id", y_range=(0.0, 0.0)),
    )
    note = (
        "The mismatch is |engine − trainer| over a fixed probe of 124 tokens, with the same weights on both "
        "sides."
    )
    return section("Weights", charts, note)


def sample_trajectories(run: Run) -> str:
    """Some prompts with a good and a bad answer each; empty where the store holds none."""
    pages = samples.pages(run)
    note = (
        "Steps spread over the run: of each prompt the best answer and the worst. Staleness: at "
        "generation → at training. Click for all."
    )
    return section("Sample trajectories", pages, note) if pages else ""


def configuration(run: Run) -> str:
    """Derived quantities, then every key."""
    known = run.launches[-1].derived if run.launches else {}
    derived = {
        name.replace("_bytes", " size").replace("_", " "): value_text(name, value)
        for name, value in known.items()
    }
    content = (keys(derived) if derived else "") + tag(
        "details", tag("summary", "every key") + keys(_flat(run.config))
    )
    return section("Configuration", content)


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = "null" if value is None else value
    return flat


def launches(run: Run) -> str:
    """One row per launch of the run: when, from which step, how it ended."""
    head = svg.row("launch", "started (UTC)", "from step", "steps that count", "time", "end", cell="th")
    rows = ""
    for index, launch in enumerate(run.launches, 1):
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(launch.start))
        origin = "the beginning" if launch.restored_step is None else f"step {launch.restored_step}"
        end = launch.reason or "none recorded"
        lasted = duration(launch.end - launch.start)
        rows += svg.row(index, started, origin, len(launch.steps), lasted, end)
    for restart in run.records.get("restart", []):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(restart["time"]))
        origin, why = f"step {restart['restored_step'] or 0}", f"because: {restart['cause']}"
        rows += svg.row("restart", when, origin, "", "", why)
    kinds = ("given_up", "lost", "regranted")
    incidents = [
        f"{len(run.records[kind])} × {kind.replace('_', ' ')}" for kind in kinds if kind in run.records
    ]
    if run.abandoned_steps:
        incidents.insert(0, f"steps done again after a restore: {run.abandoned_steps}")
    return section(
        "Launches", tag("table", head + rows), "Incidents: " + (", ".join(incidents) or "none") + "."
    )


ALL = (
    learning,
    rewards.rewards,
    staleness,
    lengths,
    turns.section_of_turns,
    sampling,
    time_line,
    accounts,
    replicas.replicas_section,
    forecast.forecast_section,
    trainer_curves,
    guard,
    weights,
    sample_trajectories,
    configuration,
    launches,
)
