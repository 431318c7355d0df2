"""environment.history=branch: does the model's template write a conversation on, or has it rewritten earlier
turns? Then a branch begins, whose prompt is all that the template writes now. Pure."""

from collections.abc import Sequence

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.turns.conversation import (
    Conversation,
    Messages,
    ToolResult,
    assistant,
    tool_message,
)


class History:
    """One trajectory's turns. `begun`: the text that its first turn answers. `anew`: the last turn's results
    have begun a branch. Raises LaminarError for a text that does not end where an answer begins."""

    def __init__(self, talk: Conversation, begun: str) -> None:
        if not begun.endswith(talk.closing):
            raise LaminarError(
                f"environment.history=branch: the tokenizer reads a prompt back as ...{begun[-40:]!r}, which "
                f"does not end with the template's {talk.closing!r}; set environment.history=keep"
            )
        self._talk = talk
        self._begun = begun.removesuffix(talk.closing)
        self._messages: Messages = []
        self.anew = False

    def answered(self, seen: str, said: str, results: Sequence[ToolResult]) -> list[int] | None:
        """The tokens that begin a branch behind a turn; None: the conversation goes on. `seen`: the text of
        the present branch, up to the end of the turn's words; `said`: those words."""
        self._messages += [assistant(said), *map(tool_message, results)]
        now = self._begun + self._talk.behind_user(self._messages)
        self.anew = not goes_on(seen, now)
        return self._talk.encoded(now) if self.anew else None


def goes_on(seen: str, now: str) -> bool:
    """Whether `now`, the template's text, begins with `seen`, white space apart: that the template writes as
    it likes around what was drawn."""
    return "".join(now.split()).startswith("".join(seen.split()))
