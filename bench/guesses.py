"""How many tokens a step with drafts would bring a request, from a run's recorded responses: no engine runs.

    python bench/guesses.py runs/demo --json guesses.json
    python bench/guesses.py runs/demo --first 100          of the steps from the 100th on

The longest response of each of --groups groups, as in a tail, is said again step by step. A guess is right
where the next recorded token is it, so what is counted is what an engine would have accepted when it drew
these tokens. Guesses come from

own          the response's own prompt and words (`ngram`)
others       these, and other prompts' responses of the steps before and of this one: at a replica to which
             the response has moved by itself
siblings     these, and all other samples of its group (`suffix`, `auto`)
siblings_half  the half of them that ended first
last_pass    others, and the prompt's group of the last pass over the data
both         siblings, and the last pass's

Figures: `tokens_per_step_...` of each, over all these responses. The last two need a run that comes to its
prompts again.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import common

from laminar_hpc.engine.sglang.plugin.drafts import ENDED_TOKENS, MATCH, PROMPT, TextIndex, longest
from laminar_hpc.engine.sglang.speculation import DRAFTED
from laminar_hpc.report import rundata
from laminar_hpc.store.payload.whole import Whole

LOOKS = 8  # steps whose groups are looked at, over all of the run
SOURCES = ("own", "others", "siblings_half", "siblings", "last_pass", "both")
COLUMNS = ("step", "groups", "tokens", *SOURCES)
Text = tuple[list[int], list[int]]  # prompt and response


def steps_of(text: Text, indices: Sequence[TextIndex]) -> int:
    """Decoding steps behind the first token, with drafts from `indices`, the first of equal ones, and from
    the text itself; as plugin/drafts.py takes them."""
    prompt, response = text
    own, said, steps = TextIndex(), 1, 0
    own.extend(prompt[-PROMPT:] + response[:1])
    while said < len(response):
        tail, room = own.tokens[-MATCH:], min(DRAFTED, len(response) - said - 1)
        draft = longest(index.draft(tail, room) for index in (own, *indices))[1]
        right = 0
        while right < len(draft) and draft[right] == response[said + right]:
            right += 1
        own.extend(response[said : said + right + 1])
        said += right + 1
        steps += 1
    return steps


def index_of(texts: Sequence[Text]) -> TextIndex:
    """Of ended responses, the newest last."""
    index = TextIndex()
    for prompt, response in texts:
        index.begin(prompt[-MATCH:] + response)
    return index


class Recorded:
    """A run's responses: by step and group, and each prompt's groups in order."""

    def __init__(self, run_dir: Path) -> None:
        run = rundata.load(run_dir)
        step_of = {t.id: t.consumed_step for t in run.consumed}
        self.groups: dict[int, list[Text]] = {}
        self.by_step: defaultdict[int, list[int]] = defaultdict(list)
        self.of_prompt: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        grouped: defaultdict[int, list[Whole]] = defaultdict(list)
        for whole in run.wholes(list(step_of)):
            grouped[whole.record.group_id].append(whole)
        for group, wholes in sorted(grouped.items()):
            wholes.sort(key=lambda whole: whole.record.time_finished)
            self.groups[group] = [(w.prompt.tolist(), w.response.tokens.tolist()) for w in wholes]
            self.by_step[step_of[wholes[0].record.trajectory_id]].append(group)
            self.of_prompt[tuple(wholes[0].prompt.tolist())].append(group)

    def last_pass(self, group: int) -> list[Text]:
        """The responses to the group's prompt in the pass before."""
        same = self.of_prompt[tuple(self.groups[group][0][0])]
        place = same.index(group)
        return self.groups[same[place - 1]] if place else []

    def others(self, step: int, apart: set[int]) -> list[Text]:
        """Of this step and those before, without these groups, as many as an engine's newest index has."""
        found: list[Text] = []
        room = ENDED_TOKENS // 2
        for at in range(step, -1, -1):
            for group in self.by_step[at]:
                if group not in apart and room > 0:
                    found += self.groups[group]
                    room -= sum(len(response) for _, response in self.groups[group])
        return found[::-1]


def look(recorded: Recorded, step: int, count: int) -> dict | None:
    """Tokens, and the steps with guesses of each source, of `count` groups of this step."""
    groups = [group for group in recorded.by_step[step] if len(recorded.groups[group]) > 1][:count]
    apart = set(groups)
    before = {group: recorded.last_pass(group) for group in groups}
    passes = {recorded.of_prompt[tuple(recorded.groups[group][0][0])].index(group) for group in groups}
    known = apart | {g for group in groups for g in recorded.of_prompt[tuple(recorded.groups[group][0][0])]}
    others, spent = index_of(recorded.others(step, known)), dict.fromkeys(SOURCES, 0)
    tokens = 0
    for group in groups:
        siblings = list(recorded.groups[group])
        text = siblings.pop(max(range(len(siblings)), key=lambda at: len(siblings[at][1])))
        tokens += len(text[1]) - 1
        half, all_of, last = (
            index_of(of) for of in (siblings[: len(siblings) // 2], siblings, before[group])
        )
        for source, indices in {
            "own": [],
            "others": [others],
            "siblings_half": [half, others],
            "siblings": [all_of, others],
            "last_pass": [last, others],
            "both": [all_of, last, others],
        }.items():
            spent[source] += steps_of(text, indices)
    if not tokens:
        return None
    if 0 in passes:
        spent["last_pass"] = spent["both"] = 0
    return {"step": step, "groups": len(groups), "tokens": tokens, "spent": spent}


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("run", type=Path, help="the run's directory")
    options.add_argument("--groups", type=int, default=128, help="groups that are looked at (default 128)")
    options.add_argument("--first", type=int, default=0, help="the first step that is looked at (default 0)")
    options = options.parse_args()
    recorded = Recorded(options.run)
    steps = [step for step in sorted(recorded.by_step) if step >= options.first]
    chosen = (
        sorted({steps[round(at * (len(steps) - 1) / (LOOKS - 1))] for at in range(LOOKS)}) if steps else []
    )
    found = [look(recorded, step, -(-options.groups // LOOKS)) for step in chosen]
    looks = [row for row in found if row is not None]
    if not looks:
        sys.exit(f"{options.run} has no groups of several responses that can be read")
    figures = {}
    for source in SOURCES:
        counted = [row for row in looks if row["spent"][source]]
        if counted:
            spent = sum(row["spent"][source] for row in counted)
            figures[f"tokens_per_step_{source}"] = sum(row["tokens"] for row in counted) / spent
    rows = [row | {s: row["tokens"] / n for s, n in row["spent"].items() if n} for row in looks]
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
