"""The report's section on rewards: each function's mean per step, and its errors. Empty without any."""

from collections import Counter

from laminar_hpc.policies.metrics import REWARD_PREFIX
from laminar_hpc.report import summary, svg
from laminar_hpc.report.page import chart, figure, grid, section
from laminar_hpc.report.rundata import Run
from laminar_hpc.report.svg import Series, tag

COLORS = ("var(--generate)", "var(--train)", "var(--pull)", "var(--publish)", "var(--soft)")
SHOWN_ERRORS = 8  # the most frequent ones
MAX_CHARACTERS = 160


def rewards(run: Run) -> str:
    """The section on rewards; empty for a run with none recorded."""
    names = list(summary.rewards(run.steps))
    errors = Counter(t.reward_error[:MAX_CHARACTERS] for t in run.consumed if t.reward_error)
    if not names and not errors:
        return ""
    charts = [_means(run, names)] if names else []
    if errors:
        failed = Series("errors", COLORS[1], run.over_steps("reward_error_count"))
        title = "trajectories with a reward error, per step"
        charts.append(chart(title, [failed], y_range=(0.0, 0.0), width=svg.HALF))
    note = (
        "The reward is the sum of weight x reward; a reward that failed counts as reward.score_on_failure."
        if names
        else ""
    )
    return section("Rewards", grid("two", *charts) + _table(errors), note)


def _means(run: Run, names: list[str]) -> str:
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    series = [Series(name, color, run.over_steps(REWARD_PREFIX + name)) for name, color in colors.items()]
    return figure(
        "mean of each reward function per batch",
        svg.legend(list(colors.items())) + svg.lines(series, "trainer step"),
    )


def _table(errors: Counter) -> str:
    """The most frequent errors of trained trajectories."""
    if not errors:
        return ""
    head = svg.row("trajectories", "reward error", cell="th")
    rows = "".join(svg.row(f"{n:,}", words) for words, n in errors.most_common(SHOWN_ERRORS))
    return tag("table", head + rows)
