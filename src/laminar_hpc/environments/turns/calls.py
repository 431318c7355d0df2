"""Tool calls in what a model has said, found by SGLang's own parsers. The parser is the first that reads what
the model's chat template writes for a call.

Importing SGLang's parsers takes seconds and brings torch: done by `CallParser`, in a thread of the rollout
while its engine starts.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.turns.json_values import json_value

_PREFERRED = ("hermes",)  # reads what others of its format want with line breaks
_USER = {"role": "user", "content": "0"}
_ARGUMENTS = {"laminar": "1"}
MOST = 256  # calls of a turn: some of SGLang's parsers look from each of them to the end of the text
_UNREADABLE = "the tool call could not be read: write it as JSON with a name and arguments"


@dataclass(frozen=True)
class ToolCall:
    """`arguments` by name."""

    name: str
    arguments: dict


@dataclass(frozen=True)
class Malformed:
    """It was meant as a call, and cannot be read; the model is told."""

    reason: str


class CallParser:
    """`tools`: JSON schemas as OpenAI's API has them; `render`: messages -> text. Raises LaminarError where
    no parser reads the template's calls."""

    def __init__(self, tools: Sequence[dict], render: Callable[[list[dict]], str]) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)  # the model is told
        envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)  # so that it can be told of those too
        self._names = [tool["function"]["name"] for tool in tools]
        self._thinks = render([_USER]).rstrip().endswith("<think>")  # the prompt begins the thought
        given = [Tool.model_validate(tool) for tool in tools]
        written = _written(render, self._names[0])
        for name in dict.fromkeys((*_PREFERRED, *FunctionCallParser.ToolCallParserEnum)):
            try:
                self._new = partial(FunctionCallParser, given, name)
                if self._parsed(written)[1] == [ToolCall(self._names[0], _ARGUMENTS)]:
                    self.name = name
                    return
            except Exception:  # a parser for other texts, or one that needs a tokenizer
                continue
        raise LaminarError(
            "environment: none of SGLang's tool-call parsers reads what the model's chat template writes for "
            f"a call: {written[:120]!r}; take a template that writes tool_calls"
        )

    def calls(self, text: str) -> list[ToolCall] | Malformed:
        """Reads the calls of one turn; an empty list is a final answer."""
        return self.split(text)[1]

    def split(self, text: str) -> tuple[str, list[ToolCall] | Malformed]:
        """One turn as what stands beside its calls, and the calls. A call in a thought was thought of, not
        made: as for SGLang's and vLLM's reasoning parsers."""
        thought, rest = thought_and_rest(text, self._thinks)
        beside, found = self._parsed(rest)
        return thought + beside, found

    def _parsed(self, text: str) -> tuple[str, list[ToolCall] | Malformed]:
        parser = self._new()
        if (opening := parser.detector.bot_token) and text.count(opening) > MOST:
            return text, Malformed(f"more than {MOST} tool calls in one turn")
        try:
            if not parser.has_tool_call(text):
                return text, []
            beside, found = parser.parse_non_stream(text)
        except Exception:  # some of SGLang's parsers raise what their parts raise on what a model writes
            return text, Malformed(_UNREADABLE)
        return beside, self._made(found)

    def _made(self, found: Sequence[Any]) -> list[ToolCall] | Malformed:
        if not found:
            return Malformed(_UNREADABLE)
        calls = []
        for item in found:
            if item.name not in self._names:
                return Malformed(f"there is no tool {item.name!r}; there is: {', '.join(self._names)}")
            try:
                arguments = json_value(item.parameters or "{}")
            except ValueError as error:
                return Malformed(f"the arguments of {item.name} are {error}")
            if not isinstance(arguments, dict):
                return Malformed(f"the arguments of {item.name} are no JSON object")
            calls.append(ToolCall(item.name, arguments))
        return calls


def thought_and_rest(text: str, thinks: bool = False) -> tuple[str, str]:
    """What a turn's text has up to its first </think>, with that, and behind. `thinks`: it begins inside a
    thought; a thought that does not end is all of it."""
    thinks = thinks or text.lstrip().startswith("<think>")
    head, mark, rest = text.partition("</think>")
    return (head + mark, rest) if mark or thinks else ("", text)


def _written(render: Callable[[list[dict]], str], name: str) -> str:
    """A call as the template writes it, with what stands around it in the assistant's turn."""
    call = {"id": "000000000", "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    before, whole = render([_USER]), render([_USER, said])
    return whole[len(before) :] if whole.startswith(before) else whole
