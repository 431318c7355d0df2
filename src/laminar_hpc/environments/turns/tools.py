"""A Python function as a tool: its JSON schema from its types and docstring, and its call with arguments that
are checked against the types. Used in environment workers; no torch."""

import inspect
import json
import re
from collections.abc import Callable
from typing import Any, cast

import pydantic

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.workers.protocol import error_words

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.M)
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


class PythonTool:
    """`name`: what the model calls it by, as the user's module or class does; `label`: what errors call it.
    Raises LaminarError for a function without types or a docstring."""

    def __init__(self, function: Callable, name: str, label: str) -> None:
        self.name = name
        if not inspect.isroutine(function):
            raise LaminarError(f"{label}: {name} is a {type(function).__name__}: write a function with def")
        self.is_async = inspect.iscoroutinefunction(function)
        self.schema = {"type": "function", "function": _schema(function, name, label)}
        self._call = pydantic.validate_call(function)
        self._titles = (function.__name__, function.__qualname__)

    def __call__(self, arguments: dict) -> object:
        """What the function returns, or an awaitable of it. Either may raise ValidationError."""
        return self._call(**arguments)

    def reason(self, error: Exception) -> str:
        """Why a call or its awaitable has failed, in words for the model."""
        own = isinstance(error, pydantic.ValidationError) and error.title in self._titles
        if isinstance(error, pydantic.ValidationError) and own:
            return "; ".join(_words(each) for each in error.errors())
        return error_words(error)


def as_text(value: object) -> str:
    """What a tool returned, for the model: a text as it is, anything else as JSON where it can be."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def error_text(reason: str) -> str:
    """What the model reads when a call has failed."""
    return json.dumps({"error": reason}, ensure_ascii=False)


def is_error(text: str) -> bool:
    """Whether the model reads of a failure."""
    return text.startswith('{"error":')


def _words(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place}: {error['msg']}"


def _schema(function: Callable, name: str, label: str) -> dict:
    """{name, description, parameters} as OpenAI's API has it."""
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    untyped = [p.name for p in signature.parameters.values() if p.annotation is inspect.Parameter.empty]
    if untyped or not text:
        missing = f"no type of its argument {untyped[0]}" if untyped else "no docstring"
        raise LaminarError(f"{label}: {name} has {missing}, which tells the model how to call it")
    try:
        parameters = pydantic.TypeAdapter[Any](cast(Any, function)).json_schema()
    except pydantic.errors.PydanticUserError as error:
        shown = str(error).splitlines()[0]
        raise LaminarError(f"{label}: {name} has types without a JSON schema ({shown})") from None
    if "properties" not in parameters:
        raise LaminarError(f"{label}: {name} takes positional arguments only; a tool's have names")
    described = _descriptions(text)
    for argument, of_one in parameters["properties"].items():
        of_one.pop("title", None)
        of_one |= {"description": described[argument]} if argument in described else {}
    parameters.pop("additionalProperties", None)
    return {"name": name, "description": _SECTION.split(text)[0].strip(), "parameters": parameters}


def _descriptions(text: str) -> dict[str, str]:
    """Reads what arguments mean from a docstring in Google's style."""
    found, last = dict[str, str](), ""
    parts = _SECTION.split(text)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        for line in body.strip("\n").splitlines():
            if (match := _ARGUMENT.match(line.strip())) and len(line) - len(line.lstrip()) <= 4:
                last = match[1]
                found[last] = match[2]
            elif last and line.strip():
                found[last] += " " + line.strip()
    return found
