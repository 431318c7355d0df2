"""Sample trajectories for the report: a few prompts from the first and the last step trained, with what was answered and where.

Responses are decoded with the tokenizer.json of the run's model directory; where that is not there, token ids are shown.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from laminar_hpc.messages import Trajectory
from laminar_hpc.observability.rundata import Consumed, Run
from laminar_hpc.observability.svg import tag, text

PROMPTS_PER_STEP = 3
MAX_CHARACTERS = 400
COLUMNS = ("step", "prompt", "response", "reward", "tokens", "weights of step", "staleness", "made by")


def table(run: Run) -> str:
    """HTML of the samples; empty text where the run has no stored trajectories."""
    if not run.consumed:
        return ""
    steps = sorted({run.consumed[0].consumed_step, run.consumed[-1].consumed_step})
    chosen = [trajectory for step in steps for trajectory in _choose([t for t in run.consumed if t.consumed_step == step])]
    stored = {t.trajectory_id: t for t in run.payloads([t.id for t in chosen])}
    decode = _decoder(run)
    rows = "".join(_row(t, stored[t.id], decode) for t in chosen if t.id in stored)
    head = tag("tr", "".join(tag("th", name) for name in COLUMNS))
    return tag("table", tag("thead", head) + tag("tbody", rows), class_="samples") if rows else ""


def _choose(trajectories: list[Consumed]) -> list[Consumed]:
    """Of the first prompts of a step the best, and the worst or (among equals) the longest other answer."""
    groups: dict[int, list[Consumed]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_id].append(trajectory)
    # Prompts with differing rewards say more than those with equal ones.
    ordered = sorted(groups.values(), key=lambda group: -len({t.reward for t in group}))[:PROMPTS_PER_STEP]
    chosen = []
    for group in ordered:
        best = max(group, key=lambda t: (t.reward, -t.response_length))
        rest = [t for t in group if t is not best]
        chosen += [best, *([min(rest, key=lambda t: (t.reward, -t.response_length))] if rest else [])]
    return chosen


def _decoder(run: Run) -> Callable[[list[int]], str]:
    """From token ids to text."""
    path = Path((run.config.get("model") or {}).get("path") or "") / "tokenizer.json"
    if not path.is_file():
        return lambda tokens: " ".join(map(str, tokens))
    tokenizer = Tokenizer.from_file(str(path))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def _row(row: Consumed, trajectory: Trajectory, decode: Callable[[list[int]], str]) -> str:
    response = decode(trajectory.response_tokens)
    if len(response) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        response = f"{response[:half]} … {len(response) - 2 * half} characters … {response[-half:]}"
    good = "good" if row.accuracy > 0 else "bad"
    reward = f"{row.reward:g}" + (" (scoring failed)" if row.reward_error else "")
    cells = [
        tag("td", str(row.consumed_step + 1)),
        tag("td", tag("code", text(decode(trajectory.prompt_tokens)))),
        tag("td", tag("code", text(response)) + ("" if row.finish_reason == "stop" else tag("em", " cut at the limit"))),
        tag("td", tag("b", text(reward), class_=good)),
        tag("td", str(row.response_length)),
        tag("td", f"{row.weight_step} (id {row.weight_id})"),
        tag("td", f"{row.staleness_generation} → {row.staleness_training}"),
        tag("td", f"rollout {row.replica}, {row.time_finished - row.time_started:.2f} s"),
    ]
    return tag("tr", "".join(cells))
