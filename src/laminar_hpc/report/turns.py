"""Responses of several turns in the report: what they had on average and where their time went, how they
ended, and failures by class. Nothing for a run whose trajectories have one turn."""

from collections import Counter

from laminar_hpc.policies.filtering import UNGRADED
from laminar_hpc.report import svg
from laminar_hpc.report.page import figure, grid, section
from laminar_hpc.report.rundata import Run
from laminar_hpc.report.svg import Series, tag

ENDS = {
    "stop": "its end-of-sequence token",
    "length": "the limit on its length",
    "turns": "environment.max_turns",
    "calls": "environment.max_tool_calls",
    "time": "environment.max_seconds",
}
COLORS = {"generate": "var(--generate)", "tool": "var(--evaluate)", "wait": "var(--wait)"}
_MEANS = ("turns", "tool_calls", "failed_calls", *(f"{kind}_seconds" for kind in COLORS))
_SHARES = ("cached_share", "busy_share")


def figures(run: Run) -> dict | None:
    """Per trained trajectory the means of what docs/metrics.md has under `environment`, and how many of them
    ended how; None without several turns."""
    steps = [step for step in run.steps if step.get("turns_mean") is not None]
    if not steps:
        return None
    return {name: weighted_mean(steps, f"{name}_mean") for name in (*_MEANS, *_SHARES)} | failures(run)


def failures(run: Run) -> dict:
    """By class, each on its own: graded ones that gave a wrong answer, those that met a limit, and what was
    not trained because its environment failed. None where the store has sums alone."""
    given_up = [str(record.get("reason", "")) for record in run.records.get("given_up", [])]
    environment = sum(reason.startswith(UNGRADED) for reason in given_up)
    if run.has_old_steps or not run.consumed:
        return {"ended": None, "wrong_answers": None, "groups_given_up": environment}
    return {
        "ended": dict(Counter(t.finish_reason for t in run.consumed).most_common()),
        "wrong_answers": sum(t.finish_reason == "stop" and t.accuracy == 0 for t in run.consumed),
        "groups_given_up": environment,
    }


def section_of_turns(run: Run) -> str:
    found = figures(run)
    if found is None:
        return ""
    seconds = [Series(kind, color, run.over_steps(f"{kind}_seconds_mean")) for kind, color in COLORS.items()]
    counts = [
        Series("turns", COLORS["generate"], run.over_steps("turns_mean")),
        Series("tool calls", COLORS["tool"], run.over_steps("tool_calls_mean")),
        Series("failed calls", "var(--bad)", run.over_steps("failed_calls_mean")),
    ]
    shares = [
        Series("later prompts in the prefix cache", COLORS["generate"], run.over_steps("cached_share_mean")),
        Series("environments at work", COLORS["tool"], run.over_steps("busy_share_mean")),
    ]

    def with_legend(title: str, series: list[Series], top: float = 0.0) -> str:
        legend = svg.legend([(one.name, one.color) for one in series])
        return figure(title, svg.lines(series, "trainer step", width=svg.THIRD, y_range=(0.0, top)), legend)

    charts = grid(
        "three",
        with_legend("per trajectory", counts),
        with_legend("seconds per trajectory", seconds),
        with_legend("shares", shares, 1.0),
    )
    return section("Turns and tools", charts + _table(run, found), "Means over each batch.")


def _table(run: Run, found: dict) -> str:
    errors = sum(bool(t.reward_error) for t in run.consumed)
    ended = found["ended"] or {}
    rows: list[tuple[str, str, object]] = [
        ("tool calls that failed, per trajectory", "told to the model", f"{found['failed_calls'] or 0:.3f}"),
        *(
            (
                f"requests of agents that were refused, the first: {record['text']}",
                "told to the agent",
                f"{weighted_mean(run.steps, 'refused_requests_mean') or 0:.3f} per trajectory",
            )
            for record in run.records.get("refused", [])[:1]
        ),
        ("answered, and wrong", "graded", found["wrong_answers"]),
        *(
            (f"ended by {ENDS.get(reason, reason)}", "graded on what was there", count)
            for reason, count in ended.items()
            if reason != "stop"
        ),
        ("reward failed", "trained with reward.score_on_failure", errors),
        ("groups whose environment failed", "not trained", found["groups_given_up"]),
        ("attempts lost", "generated again", len(run.records.get("lost", []))),
    ]
    head = svg.row("failures by class", "then", "how many", cell="th")
    body = "".join(svg.row(*("-" if cell is None else cell for cell in cells)) for cells in rows)
    return tag("table", head + body)


def weighted_mean(steps: list[dict], field: str) -> float | None:
    """Over trajectories, of a field that steps have the mean of; None where none has it."""
    known = [step for step in steps if step.get(field) is not None]
    weight = sum(step["trajectories"] for step in known)
    return sum(step[field] * step["trajectories"] for step in known) / weight if weight else None
