"""What a model's directory says of conversations: its chat template with the run's tools, as `Conversation`
and `CallParser` want them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.data.chat_template import Messages, load_chat_template, template_text
from laminar_hpc.data.tokens import load_tokenizer, stop_token_ids
from laminar_hpc.turns.conversation import Conversation


def with_tools(model_path: str, tools: Sequence[dict]) -> Callable[[Messages], str]:
    """The text of messages, with the tools, up to where the next answer begins."""
    render = load_chat_template(model_path, tools)
    return lambda messages: render(messages, "environment")


def conversation(
    model_path: str,
    tools: Sequence[dict],
    tokenizer: Tokenizer | None = None,
    answered_by: str = "tool",
    grows: bool = True,
) -> Conversation:
    """The model's; `answered_by` and `grows` as Conversation has them. Raises LaminarError where its template
    cannot be used, or leaves the tools out."""
    tokenizer, render = tokenizer or load_tokenizer(model_path), with_tools(model_path, tools)
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
        thinks="</think>" in template_text(model_path),
        answered_by=answered_by,
        grows=grows,
    )


def check_first_token(model_path: str) -> None:
    """An agent's conversations begin alike, whatever is in them: their first token is the prompt, and the
    rest of the agent's messages is given. Raises LaminarError."""
    tokenizer, first = load_tokenizer(model_path), set[int]()
    for messages, tools in (([_USER], []), ([_SYSTEM, _USER], []), ([_USER], [_TOOL])):
        try:
            text = with_tools(model_path, tools)(messages)
        except LaminarError:  # a template without a system's role
            continue
        first |= set(tokenizer.encode(text, add_special_tokens=False).ids[:1])
    if len(first) != 1:
        raise LaminarError(
            f"environment: the chat template of {model_path} begins conversations with several tokens "
            f"{sorted(first)}; take one that begins all of them with the same one, as <|im_start|> is"
        )


_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_SYSTEM = {"role": "system", "content": "0"}
_USER = {"role": "user", "content": "0"}
