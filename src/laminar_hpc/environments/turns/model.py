"""What a model's directory says of conversations: how it talks with one list of tools, by its chat template,
as `Conversation` and `CallParser` want it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.chat_template import Messages, load_chat_template, template_text
from laminar_hpc.data.tokens import load_tokenizer, stop_token_ids
from laminar_hpc.environments.turns.calls import CallParser
from laminar_hpc.environments.turns.conversation import MARK, Conversation, assistant

Arguments = Mapping[str, object] | None


@dataclass(frozen=True)
class Dialogue:
    """`parser`: None without tools. `no_user`: why a user's words cannot follow an answer; "" if they can."""

    conversation: Conversation
    parser: CallParser | None
    no_user: str = ""


def with_tools(
    model_path: str, tools: Sequence[dict], arguments: Arguments = None
) -> Callable[[Messages], str]:
    """The text of messages, with the tools, up to where the next answer begins."""
    render = load_chat_template(model_path, tools, arguments)
    return lambda messages: render(messages, "environment")


def conversation(
    model_path: str,
    tools: Sequence[dict],
    tokenizer: Tokenizer | None = None,
    answered_by: str = "tool",
    grows: bool = True,
    arguments: Arguments = None,
) -> Conversation:
    """The model's, whose template has `arguments`; `answered_by` and `grows` as Conversation has them. Raises
    LaminarError where its template cannot be used, or leaves the tools out."""
    tokenizer, render = tokenizer or load_tokenizer(model_path), with_tools(model_path, tools, arguments)
    if tools and all(tool["function"]["name"] not in render([_USER]) for tool in tools):
        raise LaminarError(
            f"environment: the chat template of {model_path} does not tell the model of its tools; take a "
            "model with a template for tools"
        )
    added = tokenizer.get_added_tokens_decoder().values()
    marks = {t.content: t.special for t in added if t.content[:1] in ("<", "[") and len(t.content) > 2}
    return Conversation(
        render,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        marks,
        [text for text, special in marks.items() if special],
        stop_token_ids(Path(model_path)),
        thinks="</think>" in template_text(model_path, tools),
        answered_by=answered_by,
        grows=grows,
    )


def dialogue(
    model_path: str,
    tools: Sequence[dict],
    grows: bool,
    arguments: Arguments = None,
    tokenizer: Tokenizer | None = None,
) -> Dialogue:
    """One whose turns are answered by tools, if there are any; the rest as `conversation` has it. Takes the
    seconds that SGLang's parsers need. Raises LaminarError for a template that cannot be used with them."""
    talk = conversation(model_path, tools, tokenizer, "tool" if tools else "", grows, arguments)
    return Dialogue(talk, CallParser(tools, with_tools(model_path, tools, arguments)) if tools else None)


def check_first_token(model_path: str, arguments: Arguments = None) -> None:
    """An agent's conversations begin alike, whatever is in them: their first token is the prompt, and the
    rest of the agent's messages is given. Raises LaminarError."""
    tokenizer, first = load_tokenizer(model_path), set[int]()
    for messages, tools in (([_USER], []), ([_SYSTEM, _USER], []), ([_USER], [_TOOL])):
        try:
            text = with_tools(model_path, tools, arguments)(messages)
        except LaminarError:  # a template without a system's role
            continue
        first |= set(tokenizer.encode(text, add_special_tokens=False).ids[:1])
    if len(first) != 1:
        raise LaminarError(
            f"environment: the chat template of {model_path} begins conversations with several tokens "
            f"{sorted(first)}; take one that begins all of them with the same one, as <|im_start|> is"
        )


def endless(config: RunConfig) -> list[str]:
    """A line where answers would run on to their limit: behind an answer the template writes none of the
    model's stop tokens. None where that cannot be told, and with environments, where it is refused."""
    if not config.data.chat_template or config.environment.several:
        return []
    path, next_ = config.model.path, "0NEXT0"
    try:
        tokenizer, stop = load_tokenizer(path), stop_token_ids(Path(path))
        render = with_tools(path, (), config.data.chat_template_arguments)
        text = render([_USER, assistant(MARK), {**_USER, "content": next_}])
    except LaminarError:  # a template for one turn, or a dry run without the model
        return []
    behind = tokenizer.encode(text.partition(MARK)[2].partition(next_)[0], add_special_tokens=False).ids
    if not behind or not set(stop).isdisjoint(behind):
        return []
    return [
        f"behind an answer the chat template of {path} writes token {behind[0]} "
        f"({tokenizer.id_to_token(behind[0])}), which is none of the stop tokens {stop}: answers may run to "
        f"sampling.max_response_tokens; if it ends a turn, add {behind[0]} to eos_token_id in "
        "generation_config.json"
    ]


_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_SYSTEM = {"role": "system", "content": "0"}
_USER = {"role": "user", "content": "0"}
