"""One trajectory's page in the report: prompt and answer, reward and its parts, log-probs, and its life from
grant to update.

There are two mismatches with the trainer's log-probs: that of the fixed probe, on the same replica with the
same weight id, which is the engines' error alone; and the trajectory's own, taken by the trainer while it
trained on it, with weights that had moved on by so many mini-batches.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.machine.observability.console import duration
from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.policies.metrics import ENVIRONMENT
from laminar_hpc.report import svg, turn_table
from laminar_hpc.report.page import figure, grid, keys
from laminar_hpc.report.rundata import Consumed, Run
from laminar_hpc.report.svg import Series, tag, text
from laminar_hpc.report.turns import ENDS
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.store.payload.whole import Whole

MAX_CHARACTERS = 6000  # of an answer; some are hundreds of kilobytes
CURVE_POINTS = 200
SHOWN_TOKENS = 5  # least likely ones


@dataclass
class Facts:
    """Of the run: (replica, weight id) -> probe mismatch; trajectory -> (own mismatch, mini-batches ahead),
    and why the guard has left it out;
    step -> its record; group -> (granted, finished); trajectory -> lost attempts, spans of its tools."""

    mismatches: dict[tuple[str, int], dict]
    own_mismatches: dict[int, tuple[float, int]]
    left_out: dict[int, str]
    steps: dict[int, dict]
    groups: dict[int, tuple[float, float]]
    lost: dict[int, list[dict]]
    tools: dict[int, list[TraceSpan]]


def facts(run: Run, rows: Sequence[Consumed]) -> Facts:
    """What the run's files say of these trajectories beyond their rows, read once for all."""
    lost: dict[int, list[dict]] = defaultdict(list)
    for record in run.records.get("lost", []):
        lost[record.get("trajectory_id", -1)].append(record)
    return Facts(
        mismatches={(str(m["replica"]), m["weight_id"]): m for m in run.records.get("logprob_mismatch", [])},
        own_mismatches=run.mismatches([row.id for row in rows]),
        left_out=run.left_out([row.id for row in rows]),
        steps={step["step"]: step for step in run.steps},
        groups=run.group_times([row.group_id for row in rows]),
        lost=lost,
        tools=turn_table.tool_spans(run, rows),
    )


def anchor(trajectory_id: int) -> str:
    return f"trajectory-{trajectory_id}"


def shortened(value: str, characters: int) -> str:
    """`value` with its middle left out beyond so many characters."""
    if len(value) <= characters:
        return value
    half = characters // 2
    return f"{value[:half]} … {len(value) - 2 * half} characters … {value[-half:]}"


def page(row: Consumed, whole: Whole, known: Facts, decode: Callable[[list[int]], str]) -> str:
    """A card that opens on a click."""
    title = (
        f"trajectory {row.id}: reward {row.reward:g}, "
        f"{row.response_length} tokens, trained in step {row.consumed_step + 1}"
    )
    prompt = tag("code", text(shortened(decode(whole.prompt.tolist()), MAX_CHARACTERS)))
    body = tag("h3", "prompt") + tag("p", prompt)
    body += tag("h3", "answer") + _answer(row, whole, known, decode)
    log_probs = _log_probs(row, whole.response, known, decode)
    body += keys(_reward(row, whole.record) | log_probs | _where(row, whole, known))
    drawn = Series("log-prob", "var(--generate)", _curve(whole.response))
    curve = svg.lines([drawn], "token of the answer", height=150)
    body += grid("two", figure("log-prob of each token when it was drawn", curve), _life(row, known))
    return tag("details", tag("summary", text(title)) + body, id=anchor(row.id), class_="trajectory")


def _answer(row: Consumed, whole: Whole, known: Facts, decode: Callable[[list[int]], str]) -> str:
    def said(tokens: list[int]) -> str:
        return tag("code", text(shortened(decode(tokens), MAX_CHARACTERS)))

    if len(whole.response.mask_runs) == 1:
        return tag("p", said(whole.response.tokens.tolist()))
    return turn_table.table(row, whole, known.tools.get(row.id, []), said)


def _reward(row: Consumed, trajectory: Trajectory) -> dict[str, object]:
    shown: dict[str, object] = {"reward": f"{row.reward:g}"}
    for name, value in sorted(trajectory.reward_parts.items()):
        own = name.startswith(ENVIRONMENT)
        shown[name.removeprefix(ENVIRONMENT).replace("_", " ") if own else f"reward: {name}"] = f"{value:.4g}"
    return shown | ({"scoring failed": row.reward_error} if row.reward_error else {})


def _log_probs(
    row: Consumed, response: Response, known: Facts, decode: Callable[[list[int]], str]
) -> dict[str, object]:
    mask = response.loss_mask
    logprobs, tokens = response.logprobs[mask], response.tokens[mask]
    shown: dict[str, object] = {}
    if len(tokens):
        mean = float(logprobs.mean(dtype=np.float64))
        least = np.lexsort((tokens, logprobs))[:SHOWN_TOKENS]
        rare = ", ".join(f"{decode([int(tokens[i])])!r} {logprobs[i]:.2f}" for i in least)
        shown |= {
            "mean log-prob (engine)": f"{mean:.4f}",
            "perplexity": f"{math.exp(-mean):.3f}",
            "least likely tokens": rare,
        }
    mismatch = known.mismatches.get((f"rollout{row.replica}", row.weight_id))
    shown["mismatch with the trainer, same weights (probe)"] = (
        f"mean {mismatch['mean']:.1e}, max {mismatch['max']:.1e}" if mismatch else "not measured"
    )
    if row.id in known.own_mismatches:
        mean_mismatch, ahead = known.own_mismatches[row.id]
        by = f"{ahead} mini-batches" if ahead else "nothing: the engine's weights"
        shown["mismatch with the trainer when it was trained"] = (
            f"mean {mean_mismatch:.1e}, weights ahead by {by}"
        )
    if row.id in known.left_out:
        shown["left out of its update by the guard"] = known.left_out[row.id]
    step = known.steps.get(row.consumed_step + 1, {})
    if step.get("ratio_mean") is not None and step.get("ratio_max") is not None:
        shown["importance ratio in its step"] = f"mean {step['ratio_mean']:.4f}, max {step['ratio_max']:.3f}"
    return shown


def _where(row: Consumed, whole: Whole, known: Facts) -> dict[str, object]:
    reasons = "; ".join(
        f"attempt {r.get('attempt', 0) + 1}: {r.get('reason', '')}" for r in known.lost.get(row.id, [])
    )
    spans = ", ".join(
        f"{span.weight_id} (tokens {span.start} to {span.end})" for span in whole.response.spans
    )
    trajectory = whole.record
    return {
        "replica": f"rollout {row.replica}",
        "weight ids, by the engine": spans,
        "weights of step": row.weight_step,
        "last token at step": row.step_finished,
        "trained with weights of step": row.consumed_step,
        "staleness": f"{row.staleness_generation} at generation, {row.staleness_training} at training",
        "ended by": ENDS.get(row.finish_reason, row.finish_reason),
        "turns": np.count_nonzero(whole.response.mask_runs[::2]),
        "attempts": f"{trajectory.attempt + 1}" + (f" ({reasons})" if reasons else ""),
        "moves between replicas": trajectory.moves,
    }


def _life(row: Consumed, known: Facts) -> str:
    """When it was where, as seconds since its group was granted."""
    granted, grouped = known.groups.get(row.group_id, (0.0, 0.0))
    trained = known.steps.get(row.consumed_step + 1, {}).get("time", 0.0)
    events = [
        ("group granted", granted),
        ("first token asked for", row.time_started),
        ("last token", row.time_finished),
        ("scored", row.time_scored),
        ("group complete", grouped),
        ("trained", trained),
    ]
    present = [(name, at) for name, at in events if at]
    first = min((at for _, at in present), default=0.0)
    lines = "".join(svg.row(name, f"+{duration(at - first)}") for name, at in present)
    return figure("its life", tag("table", lines))


def _curve(response: Response) -> list[tuple[float, float | None]]:
    """(drawn token, log-prob); of long answers the least likely token of each stretch."""
    logprobs: Sequence[float] = response.logprobs[response.loss_mask].tolist()
    stretch = max(1, math.ceil(len(logprobs) / CURVE_POINTS))
    return [(i, min(logprobs[i : i + stretch])) for i in range(0, len(logprobs), stretch)]
