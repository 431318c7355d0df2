"""How a model talks with one list of tools."""

from collections.abc import Sequence
from dataclasses import dataclass

from laminar_hpc.turns.calls import CallParser
from laminar_hpc.turns.conversation import Conversation
from laminar_hpc.turns.model import Arguments, conversation, with_tools


@dataclass(frozen=True)
class Dialogue:
    """`parser`: None where there are no tools. `no_user`: why a user's words cannot follow an answer; ""
    where they can."""

    conversation: Conversation
    parser: CallParser | None
    no_user: str = ""


def with_answers(
    model_path: str, tools: Sequence[dict], grows: bool, arguments: Arguments = None
) -> Dialogue:
    """One whose turns are answered by tools; `grows` and `arguments` as `conversation` has them. Takes the
    seconds that SGLang's parsers need. Raises LaminarError for a template that cannot be used with them."""
    talk = conversation(model_path, tools, grows=grows, arguments=arguments)
    return Dialogue(talk, CallParser(tools, with_tools(model_path, tools, arguments)))
