"""`observability.show_samples=N`: after each step's line, a response each to N of its prompts, reward and
staleness.

The picks are spread over the batch and do not depend on the reward; they rotate with the step. Called by the
controller's loop; reads what the step trained on from the store. Text of a model is escaped: it may hold what
moves a terminal's cursor.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from laminar_hpc.messages.data import Trajectory
from laminar_hpc.messages.wire import decode_trajectory
from laminar_hpc.observability.console import line

PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 120, 320


class Trained(Protocol):
    """What is read of the controller's store."""

    def consumed_groups(self, step: int) -> list[int]: ...

    def payloads(self, group_ids: list[int]) -> list[bytes]: ...


class ShownSamples:
    def __init__(self, model: Path, number: int, say: Callable[[str], None]) -> None:
        self._number, self._say = number, say
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json")) if number else None

    def show(self, step: int, store: Trained) -> None:
        """The samples of trainer step `step`, counted from 0."""
        if self._tokenizer is None:
            return
        for pick, group_id in enumerate(spread(store.consumed_groups(step), self._number, step)):
            members = [decode_trajectory(blob) for blob in store.payloads([group_id])]
            if members:
                self._say(sample_line(members[(step + pick) % len(members)], step, self._tokenizer))


def spread(group_ids: Sequence[int], number: int, step: int) -> list[int]:
    """Up to `number` of them at equal distances, others in the next step."""
    size, number = len(group_ids), min(number, len(group_ids))
    return [group_ids[(step + place * size // number) % size] for place in range(number)]


def sample_line(trajectory: Trajectory, step: int, tokenizer: Tokenizer) -> str:
    """`step`: that trained it, counted from 0."""
    prompt = tokenizer.decode(trajectory.prompt_tokens, skip_special_tokens=False)
    response = tokenizer.decode(trajectory.response_tokens, skip_special_tokens=True)
    reward = f"reward {trajectory.reward:5.2f}" + (
        " (its function failed)" if trajectory.reward_error else ""
    )
    cut = " (cut at the limit)" if trajectory.finish_reason == "length" else ""
    texts = f'"{shown(prompt, PROMPT_CHARACTERS)}" -> "{shown(response, RESPONSE_CHARACTERS)}"{cut}'
    return line("sample", f"{reward}  stale {step - trajectory.weight_step}  {texts}")


def shown(text: str, characters: int) -> str:
    """Printable on one line, its middle left out beyond so many characters: a prompt's task and a response's
    answer tend to end it."""
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
