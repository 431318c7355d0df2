"""Calls are read by SGLang's own parsers; what cannot be read is told to the model."""

from pathlib import Path

import pytest

from helpers.models.chats import SEPARATED, save
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.turns.calls import CallParser, Malformed, ToolCall
from laminar_hpc.environments.turns.model import with_tools
from laminar_hpc.environments.turns.tools import PythonTool


def add(a: int, b: float = 2.0) -> float:
    """Adds.

    Args:
        a: the first,
            an integer
        b (float): the second

    Returns:
        the sum
    """
    return a + b


TOOLS = [PythonTool(add, "add", "here").schema]
PYTHONIC = (
    SEPARATED.replace("<tool_call>\n{", "{{ '[' }}")
    .replace("}\n</tool_call>", "]")
    .replace(
        '"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}',
        "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})",
    )
)

LLAMA = SEPARATED.replace("<tool_call>\n", "<|python_tag|>").replace("\n</tool_call>", "")
MISTRAL = SEPARATED.replace("<tool_call>\n", "[TOOL_CALLS] [").replace("\n</tool_call>", "]")
FORMATS = {
    "hermes": (SEPARATED, "<tool_call>", "</tool_call>"),
    "llama3": (LLAMA, "<|python_tag|>", ""),
    "mistral": (MISTRAL, "[TOOL_CALLS] [", "]"),
    "pythonic": (PYTHONIC, "[", "]"),
}
NESTED = '{"name": "add", "arguments": {"a": ' + "[" * 9000
SAID = [
    *("7", "null", "[[", '{"name": ["add"]}', '{"name": 5, "arguments": {}}', '{"name": null}', "\0"),
    *('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", NESTED, NESTED + "]" * 9000 + "}}"),
    *("add(a=1+b)", "add(a=**{})", "add(" + "(" * 400 + ")" * 400 + ")", "add(*a)", "x.y.add(a=1)", "add(b="),
]


def call(text: str) -> str:
    return f"so <tool_call>{text}</tool_call>"


def test_what_a_model_says(tmp_path: Path) -> None:
    """A final answer, one call, two calls, and every way of getting one wrong."""
    model = str(save(tmp_path, SEPARATED, ["<|end|>"]))
    parser = CallParser(TOOLS, with_tools(model, TOOLS))
    one = '{"name": "add", "arguments": {"a": 1}}'
    assert parser.calls("the answer is 3") == []
    assert parser.calls(call(one)) == [ToolCall("add", {"a": 1})]
    assert parser.calls(call(one) + call(one)) == [ToolCall("add", {"a": 1})] * 2
    for text, words in (
        ('{"name": "add", "argu', "could not be read"),
        ("", "could not be read"),
        ("7", "could not be read"),
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'; there is: add"),
        ('{"name": "add", "arguments": [1]}', "no JSON object"),
    ):
        found = parser.calls(call(text))
        assert isinstance(found, Malformed) and words in found.reason, text


def test_a_call_that_was_thought_of_is_not_made(tmp_path: Path) -> None:
    """Calls count behind the thought, as for SGLang's and vLLM's reasoning parsers: also where the prompt has
    begun it, and where it does not end."""
    render = with_tools(str(save(tmp_path / "model", SEPARATED, ["<|end|>"])), TOOLS)
    made, other = call('{"name": "add", "arguments": {"a": 1}}'), call("{")
    for parser, begin in (
        (CallParser(TOOLS, render), "<think>\n"),
        (CallParser(TOOLS, lambda messages: render(messages) + "<think>\n"), ""),
    ):
        for thought in (made, other, "perhaps"):
            text = f"{begin}{thought}\n</think>\n\n"
            assert parser.split(f"{text}5") == (f"{text}5", [])
            beside, found = parser.split(text + made)
            assert found == [ToolCall("add", {"a": 1})] and beside.split("</think>")[1].strip() == "so"
            assert isinstance(parser.calls(text + other), Malformed)
            assert parser.calls(f"{begin}{thought}") == []


def test_the_parser_is_that_of_the_template(tmp_path: Path) -> None:
    """Another format is read by another parser; a template without one is refused."""
    pythonic = str(save(tmp_path / "pythonic", PYTHONIC, ["<|end|>"]))
    parser = CallParser(TOOLS, with_tools(pythonic, TOOLS))
    assert parser.calls("[add(a=1)]") == [ToolCall("add", {"a": 1})]
    silent = str(save(tmp_path / "silent", SEPARATED.split("{% for c in")[0] + "{% endfor %}", ["<|end|>"]))
    with pytest.raises(LaminarError, match="none of SGLang's tool-call parsers reads"):
        CallParser(TOOLS, with_tools(silent, TOOLS))


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_model_says(tmp_path: Path, name: str) -> None:
    """In any format, what is no call is told to the model or is its answer: SGLang's parsers raise what they
    like on it, and none of that ends a replica."""
    template, begin, end = FORMATS[name]
    parser = CallParser(TOOLS, with_tools(str(save(tmp_path, template, ["<|end|>"])), TOOLS))
    assert parser.name == name
    for text in SAID:
        found = parser.calls(begin + text + end)
        assert found == [] or isinstance(found, Malformed), text[:80]
    many = parser.calls(300 * parser._new().detector.bot_token)
    assert many == (Malformed("more than 256 tool calls in one turn") if name != "pythonic" else [])


def test_arguments_that_nothing_can_take(tmp_path: Path) -> None:
    """Values that no tokenizer or process would take are told to the model; a large number is one like any
    other."""
    parser = CallParser(TOOLS, with_tools(str(save(tmp_path, SEPARATED, ["<|end|>"])), TOOLS))
    large = parser.calls(call('{"name": "add", "arguments": {"a": 1' + "0" * 40 + "}}"))
    assert large == [ToolCall("add", {"a": 10**40})]
    deep = "[" * 80 + "]" * 80
    unfit = {deep: "nested deeper than 64 levels", '"\\ud800"': "half of a surrogate pair"}
    unfit |= dict.fromkeys(("NaN", "-Infinity", "1e999"), "are no JSON")
    for value, words in unfit.items():
        found = parser.calls(call('{"name": "add", "arguments": {"a": ' + value + "}}"))
        assert isinstance(found, Malformed) and words in found.reason and "add" in found.reason


def test_a_function_is_described_as_the_model_wants_it() -> None:
    """Its schema has types, defaults and the docstring's words."""
    assert TOOLS[0]["function"] == {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first, an integer"},
                "b": {"type": "number", "default": 2.0, "description": "the second"},
            },
            "required": ["a"],
        },
    }


def untyped(a):  # type: ignore[no-untyped-def]
    """Does."""


def silent(a: int) -> int:
    return a


@pytest.mark.parametrize(
    "function, words", [(untyped, "no type of its argument a"), (silent, "no docstring")]
)
def test_what_is_no_tool(function, words) -> None:
    """One line that says what the model would lack."""
    with pytest.raises(LaminarError, match=words):
        PythonTool(function, function.__name__, "environment.tools: x")
