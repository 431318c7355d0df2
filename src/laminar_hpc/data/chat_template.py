"""A model's chat template: messages -> the text that the model sees, as transformers renders it, without
importing it (or torch)."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import read_json

if TYPE_CHECKING:
    from jinja2 import Environment

Messages = list[dict]
Render = Callable[..., str]  # (messages, place of the row, goes_on=False) -> text
_TAGS = {"generation"}
_END = "0END_OF_THE_LAST_MESSAGE0 "  # what it trims, the template has trimmed
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}  # roles; the others are the same


def template_text(model_path: str, tools: Sequence[dict] = ()) -> str:
    """The template itself, of several the one that transformers takes; empty where the model has none. Raises
    LaminarError for several without a default."""
    folder = Path(model_path)
    found: Any = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (file := folder / "chat_template.jinja").exists():
        found["default"] = file.read_text(encoding="utf-8")
    found = found or read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    if isinstance(found, str):
        return found
    name = "tool_use" if tools and "tool_use" in found else "default"
    if name not in found:
        raise LaminarError(
            f"{folder} has the chat templates {', '.join(sorted(found))} and no default; save one of them as "
            "chat_template.jinja"
        )
    return str(found[name])


def _environment() -> "Environment":
    """Jinja with what transformers gives a template."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    class Generation(Extension):
        """Around what a trainer of messages takes for the assistant's words."""

        tags = _TAGS

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda format_: datetime.now().strftime(format_),
    }
    return environment


def load_chat_template(
    model_path: str, tools: Sequence[dict] = (), arguments: Mapping[str, object] | None = None
) -> Render:
    """render(messages, where) -> text that ends where the assistant's answer begins, or with `goes_on` where
    its last message does, which the model continues. It tells the model of `tools`; `arguments`: variables of
    the template, which go before its special tokens. Raises LaminarError when the model has no template."""
    from jinja2 import TemplateSyntaxError, UndefinedError

    folder = Path(model_path)
    if not (text := template_text(model_path, tools)):
        raise LaminarError(
            f"data.chat_template=true, but {folder} has no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json); "
            "add one or set data.chat_template=false"
        )
    try:
        template = _environment().from_string(text)
    except TemplateSyntaxError as error:
        raise LaminarError(
            f"{folder}: its chat template is not valid Jinja ({error.message}, line {error.lineno}); mend it"
        ) from None
    given = {**_special_tokens(folder), **(arguments or {}), "tools": list(tools) or None, "documents": None}

    def render(messages: Messages, where: str, goes_on: bool = False) -> str:
        if goes_on:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _END}]
        try:
            text = template.render(messages=messages, add_generation_prompt=not goes_on, **given)
        except Exception as error:  # whatever the template's code raises on these messages
            said = " ".join(str(error).split()) or type(error).__name__
            cure = "mend the row"
            if isinstance(error, UndefinedError):
                cure += ", or name what it lacks in data.chat_template_arguments"
            raise LaminarError(
                f"{where}: the model's chat template refuses its messages ({said}); {cure}"
            ) from None
        if not goes_on:
            return text
        before, end, behind = text.rpartition(_END.strip())
        if not end:
            raise LaminarError(f"{where}: the model's chat template leaves out the end of the last message")
        return before if behind[:1] == " " else before.rstrip()

    return render


def _special_tokens(folder: Path) -> dict[str, str]:
    """By name, as a tokenizer of transformers has them: its older file counts where the newer one does not
    list the tokens."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
    more = settings.get("extra_special_tokens")
    settings |= more if isinstance(more, dict) else {}
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named = {name: v.get("content") if isinstance(v, dict) else v for name, v in named.items()}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def as_messages(value: object) -> Messages | None:
    """A prompt as chat messages: a text is one of the user; None when it is neither a text nor a list of
    messages.

    A message is {role, content}, or ShareGPT's {from, value}. What is null is left out: Parquet fills in the
    keys of other messages. As in requests of agents, content may be a list of parts that are texts, or absent
    beside tool calls, whose arguments may be JSON; a developer is the system."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        return None
    found = [_message(each) for each in value]
    return None if None in found else found  # type: ignore[return-value]


def continued(messages: Messages) -> bool:
    """Whether the assistant has the last word, so that its answer has begun."""
    return messages[-1]["role"] == "assistant"


def _message(value: object) -> dict | None:
    if not isinstance(value, dict):
        return None
    message = _without_nulls(value)
    if "from" in message and "role" not in message:
        role, content = message.pop("from"), message.pop("value", None)
        message |= {"role": _SHAREGPT.get(role, role) if isinstance(role, str) else role, "content": content}
    calls = message.get("tool_calls")
    content = message.get("content", "" if calls else None)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        return None
    message["role"] = "system" if message["role"] == "developer" else message["role"]
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**message, "content": content}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
