"""A model's chat template: messages -> the text that the model sees, as transformers renders it, without
importing it (or torch)."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar_hpc.config.errors import LaminarError

if TYPE_CHECKING:
    from jinja2 import Environment

Messages = list[dict]
Render = Callable[[Messages, str], str]  # (messages, place of the row) -> text
_TAGS = {"generation"}
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def template_text(model_path: str) -> str:
    """The template itself; empty where the model has none."""
    folder = Path(model_path)
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    text = _read(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(text, list):  # several templates by name
        text = next((t["template"] for t in text if t.get("name") == "default"), None)
    return text or ""


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


def load_chat_template(model_path: str, tools: Sequence[dict] = ()) -> Render:
    """render(messages, where) -> text that ends where the assistant's answer begins; it tells the model of
    `tools`. Raises LaminarError when the model has no template."""
    from jinja2 import TemplateSyntaxError

    folder = Path(model_path)
    settings = _read(folder / "tokenizer_config.json")
    if not (text := template_text(model_path)):
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
    given: dict[str, object] = {name: _token(settings[name]) for name in _TOKENS if settings.get(name)}
    given |= {"tools": list(tools) or None, "documents": None}

    def render(messages: Messages, where: str) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=True, **given)
        except Exception as error:  # whatever the template's code raises on these messages
            said = " ".join(str(error).split()) or type(error).__name__
            raise LaminarError(
                f"{where}: the model's chat template refuses its messages ({said}); mend the row"
            ) from None

    return render


def as_messages(value: object) -> Messages | None:
    """A prompt as chat messages: a text is one of the user; None when it is neither a text nor a list of
    {role, content}."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    good = isinstance(value, list) and bool(value)
    for message in value if isinstance(value, list) else []:
        good &= (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        )
    return value if good and isinstance(value, list) else None


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LaminarError(f"{path} is not JSON ({error}); download the model again") from None


def _token(value: Any) -> str:
    """A special token's text: tokenizer_config.json has it as a text or as {content, ...}."""
    return str(value["content"] if isinstance(value, dict) else value)
