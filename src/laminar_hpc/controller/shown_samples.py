"""`observability.show_samples=N`: after each step's line, a response each to N of its prompts, reward and
staleness.

The picks are spread over the batch and do not depend on the reward; they rotate with the step. Called by the
controller's loop; reads what the step trained on from the store. Text of a model is escaped: it may hold what
moves a terminal's cursor.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.training import BatchGroup
from laminar_hpc.machine.observability.console import line
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rows import Rows

PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 120, 320


class ShownSamples:
    def __init__(self, model: Path, number: int, say: Callable[[str], None]) -> None:
        self._number = number
        self._say = say
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json")) if number else None

    def show(self, step: int, trained: Rows, run_dir: Path) -> None:
        """The samples of trainer step `step`, counted from 0. `run_dir`: where their responses are."""
        if self._tokenizer is None:
            return
        for pick, group_id in enumerate(spread(trained.consumed_groups(step), self._number, step)):
            for group in trained.batch([group_id]):
                group.trajectories = [group.trajectories[(step + pick) % len(group.trajectories)]]
                self._show(run_dir, group, step, self._tokenizer)

    def _show(self, run_dir: Path, group: BatchGroup, step: int, tokenizer: Tokenizer) -> None:
        try:
            [whole] = wholes(run_dir, [group], late=0.0)
            self._say(sample_line(whole, step, tokenizer))
        except LaminarError as error:  # the trainers say it where it matters
            self._say(line("warning", str(error)))


def spread(group_ids: Sequence[int], number: int, step: int) -> list[int]:
    """Up to `number` of them at equal distances, others in the next step."""
    size, number = len(group_ids), min(number, len(group_ids))
    return [group_ids[(step + place * size // number) % size] for place in range(number)]


def sample_line(whole: Whole, step: int, tokenizer: Tokenizer) -> str:
    """`step`: that trained it, counted from 0."""
    trajectory = whole.record
    prompt = tokenizer.decode(whole.prompt.tolist(), skip_special_tokens=False)
    response = tokenizer.decode(whole.response.tokens.tolist(), skip_special_tokens=True)
    failed = " (its function failed)" if trajectory.reward_error else ""
    cut = "" if trajectory.finish_reason == "stop" else " (cut at the limit)"
    texts = f'"{shown(prompt, PROMPT_CHARACTERS)}" -> "{shown(response, RESPONSE_CHARACTERS)}"{cut}'
    return line(
        "sample", f"reward {trajectory.reward:5.2f}{failed}  stale {step - trajectory.weight_step}  {texts}"
    )


def shown(text: str, characters: int) -> str:
    """Printable on one line, its middle left out: a prompt's task and a response's answer end it."""
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
