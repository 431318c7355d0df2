"""What a model's directory says of conversations: its chat template with the run's tools, as `Conversation`
and `CallParser` want them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.data.chat_template import Messages, load_chat_template, template_text
from laminar_hpc.data.tokens import load_tokenizer, stop_token_ids
from laminar_hpc.turns.conversation import Conversation


def with_tools(model_path: str, tools: Sequence[dict]) -> Callable[[Messages], str]:
    """The text of messages, with the tools, up to where the next answer begins."""
    render = load_chat_template(model_path, tools)
    return lambda messages: render(messages, "environment")


def conversation(model_path: str, tools: Sequence[dict]) -> Conversation:
    """The model's. Raises LaminarError where its template's conversations do not only grow, or leave the
    tools out."""
    tokenizer, render = load_tokenizer(model_path), with_tools(model_path, tools)
    if tools and all(tool["function"]["name"] not in render([_USER]) for tool in tools):
        raise LaminarError(
            f"environment: the chat template of {model_path} does not tell the model of its tools; take a "
            "model with a template for tools"
        )
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    specials = [text for text in added if text[:1] in ("<", "[") and len(text) > 2]
    return Conversation(
        render,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        specials,
        stop_token_ids(Path(model_path)),
        thinks="</think>" in template_text(model_path),
    )


_USER = {"role": "user", "content": "0"}
