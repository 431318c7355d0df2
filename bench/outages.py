"""What the others did while a role was dead, from a run's own records; called by bench/faults.py.

`killed` and `back` are seconds since the epoch: the kill, and the next sign of life of what was killed.
"""

import sqlite3
import statistics
from itertools import pairwise

from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report.idle import busy
from laminar_hpc.report.rundata import Run

BEFORE_SECONDS = 60.0  # that the time after a kill is compared with
SHORTEST_SECONDS = 1.0  # of what was met by a death, and of idle time: loading weights takes as long


def _spans(run: Run, role: str) -> list[TraceSpan]:
    return [span for name, spans in run.spans.items() if name.rstrip("0123456789") == role for span in spans]


def _rows(run: Run, sql: str, *values: float) -> list[tuple]:
    with sqlite3.connect(f"file:{run.store}?mode=ro", uri=True) as database:
        return database.execute(sql, values).fetchall()


def rollouts_share(run: Run, killed: float, back: float) -> float | None:
    """Tokens per second of the local batches that a controller's death has met, to their last tokens, over
    those of the local batches before; None if no replica had enough to go on with. Their tails, in which ever
    fewer responses are left, are in both."""
    batches = [
        (span.t0, span.t1, span.fields["tokens"] / (span.t1 - span.t0))
        for span in _spans(run, "rollout")
        if span.kind == "generate" and span.fields.get("tokens")
    ]
    met = [speed for t0, t1, speed in batches if t0 <= killed and t1 - killed > SHORTEST_SECONDS]
    before = [speed for _, t1, speed in batches if killed - BEFORE_SECONDS < t1 <= killed]
    return statistics.fmean(met) / statistics.median(before) if met and before else None


def trainer_share(run: Run, killed: float, back: float) -> float | None:
    """Seconds per trained token of the steps begun while a rollout was away, over those of the steps
    before."""
    tokens = {step["step"]: step["prompt_tokens"] + step["response_tokens"] for step in run.steps}
    costs = [
        (span.t0, (span.t1 - span.t0) / tokens[span.fields["step"] + 1])
        for span in _spans(run, "trainer")
        if span.kind == "train" and span.fields["step"] + 1 in tokens
    ]
    before = [cost for t0, cost in costs if killed - BEFORE_SECONDS < t0 <= killed]
    over = [cost for t0, cost in costs if killed < t0 <= back]
    return statistics.median(over) / statistics.median(before) if before and over else None


def groups_left(run: Run, killed: float, back: float) -> int | None:
    """The largest number of groups that admission would still have let the rollouts have when one of them
    fell idle without trainers; None if none did. `back`: when the next trainers published weights."""
    algorithm, bound = run.config["algorithm"], run.config["pipeline"]["max_staleness"]
    left = list[int]()
    for name, spans in run.spans.items():
        if not name.startswith("rollout"):
            continue
        for (_, idle), (again, _) in pairwise(busy(spans)):
            if killed <= idle < back and again - idle > SHORTEST_SECONDS:
                ((granted,),) = _rows(
                    run, "SELECT COALESCE(MAX(number), 0) FROM groups WHERE granted_at <= ?", idle
                )
                step = max(pull["step"] for pull in run.records["pull"] if pull["time"] <= idle)
                left.append(algorithm["prompts_per_step"] * (step + bound + 1) - granted)
    return max(left, default=None)
