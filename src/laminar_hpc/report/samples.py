"""Sample trajectories for the report: a handful over the whole run, of prompts that were answered well and
badly.

Steps spread evenly over the run, of each the prompts whose answers differ most in reward, of each of these
the best answer and the worst. The table is the overview; each row leads to a trajectory's own page
(`trajectory_page`). Responses are decoded with the tokenizer.json of the run's model directory; where that is
not there, token ids are shown.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from laminar_hpc.report import trajectory_page
from laminar_hpc.report.rundata import Consumed, Run
from laminar_hpc.report.svg import tag, text
from laminar_hpc.store.payload.whole import Whole

STEPS = 4
PROMPTS_PER_STEP = 2
MAX_CHARACTERS = 400
COLUMNS = ("", "step", "prompt", "response", "reward", "tokens", "weights of step", "staleness", "made by")


def pages(run: Run) -> str:
    """HTML of the samples: the overview, then a page for each; empty without stored trajectories."""
    if not run.consumed:
        return ""
    chosen = choose(run.consumed)
    stored = {t.record.trajectory_id: t for t in run.wholes([t.id for t in chosen])}
    decode = _decoder(run)
    known = [row for row in chosen if row.id in stored]
    head = tag("tr", "".join(tag("th", name) for name in COLUMNS))
    rows = "".join(_row(row, stored[row.id], decode) for row in known)
    table = tag("table", tag("thead", head) + tag("tbody", rows), class_="samples")
    facts = trajectory_page.facts(run, known)
    return (
        table + "".join(trajectory_page.page(row, stored[row.id], facts, decode) for row in known)
        if rows
        else ""
    )


def choose(trajectories: list[Consumed]) -> list[Consumed]:
    """The samples, in order of the steps that trained them. `trajectories` are in that order."""
    steps = sorted({t.consumed_step for t in trajectories})
    places = sorted({round(i * (len(steps) - 1) / max(1, STEPS - 1)) for i in range(STEPS)})
    return [
        t for place in places for t in _of_step([t for t in trajectories if t.consumed_step == steps[place]])
    ]


def _of_step(trajectories: list[Consumed]) -> list[Consumed]:
    """Of the first prompts of a step the best, and the worst or (among equals) the longest other answer."""
    groups: dict[int, list[Consumed]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_id].append(trajectory)
    # Prompts with differing rewards say more than those with equal ones.
    ordered = sorted(
        groups.values(), key=lambda group: min(t.reward for t in group) - max(t.reward for t in group)
    )[:PROMPTS_PER_STEP]
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


def _row(row: Consumed, whole: Whole, decode: Callable[[list[int]], str]) -> str:
    response = trajectory_page.shortened(decode(whole.response.tokens.tolist()), MAX_CHARACTERS)
    good = "good" if row.accuracy > 0 else "bad"
    reward = f"{row.reward:g}" + (" (scoring failed)" if row.reward_error else "")
    prompt = trajectory_page.shortened(decode(whole.prompt.tolist()), MAX_CHARACTERS)
    cut = "" if row.finish_reason == "stop" else tag("em", " cut at the limit")
    cells = [
        tag("a", f"{row.id}", href=f"#{trajectory_page.anchor(row.id)}"),
        str(row.consumed_step + 1),
        tag("code", text(prompt)),
        tag("code", text(response)) + cut,
        tag("b", text(reward), class_=good),
        str(row.response_length),
        f"{row.weight_step} (id {row.weight_id})",
        f"{row.staleness_generation} → {row.staleness_training}",
        f"rollout {row.replica}, {row.time_finished - row.time_started:.2f} s",
    ]
    return tag("tr", "".join(tag("td", cell) for cell in cells))
