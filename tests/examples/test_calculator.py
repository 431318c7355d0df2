"""The shipped calculator example: its committed data, its base model with its chat template, its tool and its
reward."""

import laminar_hpc.machine.compat.torchvision  # noqa: F401  (first: lets transformers import under CPU torch)
from helpers.paths import EXAMPLES

# isort: split
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from laminar_hpc.environments.calculator import calculate, reward
from laminar_hpc.environments.turns.calls import CallParser, ToolCall
from laminar_hpc.environments.turns.conversation import ToolResult
from laminar_hpc.environments.turns.model import conversation, with_tools
from laminar_hpc.environments.turns.tools import PythonTool

EXAMPLE = EXAMPLES / "calculator"
BASE = str(EXAMPLE / "base")
TOOLS = [PythonTool(calculate, "calculate", "environment.tools").schema]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The example's two scripts, which are no package; other examples have scripts of the same names."""
    names = ("make_data", "train_base")
    before = {name: sys.modules.get(name) for name in names}
    found = {}
    for name in names:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
        assert spec and spec.loader
        found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    for name, module in before.items():
        sys.modules.pop(name)
        if module:
            sys.modules[name] = module
    yield found


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / "data" / f"{name}.jsonl").read_text().splitlines()]


def test_data_regenerates_identically(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed data are what the committed script writes, byte for byte."""
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(tmp_path)])
    scripts["make_data"].main()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / "data" / name).read_bytes()


def test_rows_are_distinct_and_their_answers_right(scripts: dict[str, ModuleType]) -> None:
    """Each answer is what Python makes of the prompt; no problem is there twice, on either side; a held-out
    one is in no supervised example, as its side is the hash of its text."""
    train, heldout = rows_of("train"), rows_of("heldout")
    prompts = [row["prompt"] for row in (*train, *heldout)]
    assert len(set(prompts)) == len(prompts) and len(train) >= 4000 and len(heldout) >= 256
    assert all(str(eval(row["prompt"])) == row["answer"] for row in (*train, *heldout))
    side_of, rng = scripts["make_data"].side_of, random.Random(5)
    assert {side_of(row["prompt"]) for row in heldout} == {"heldout"}
    drawn = [scripts["make_data"].draw_problem(rng, "train") for _ in range(500)]
    assert {side_of(problem.prompt) for problem in drawn} == {"train"}


async def test_the_calls_of_a_problem_lead_to_its_answer(scripts: dict[str, ModuleType]) -> None:
    """Every call is one operation, which the calculator answers as the supervised example says; each number
    in it is the problem's or an earlier result."""
    rng = random.Random(7)
    for _ in range(200):
        problem = scripts["make_data"].draw_problem(rng, "heldout")
        assert len(problem.calls) in (2, 3) and problem.answer == str(eval(problem.prompt))
        known = problem.prompt
        for expression, result in problem.calls:
            assert await calculate(expression) == result
            assert all(
                number in known for number in expression.replace("-", "+").replace("*", "+").split("+")
            )
            known += f" {result}"


def test_a_supervised_conversation_is_the_one_of_a_run(scripts: dict[str, ModuleType]) -> None:
    """Token by token: the model is trained on what the template writes of the run's tools and on what stands
    between two turns of a run; its calls are read by SGLang's parser."""
    train_base, rng = scripts["train_base"], random.Random(3)
    render, grown = with_tools(BASE, TOOLS), conversation(BASE, TOOLS)
    parser, encode = CallParser(TOOLS, render), train_base.build_tokenizer().backend_tokenizer.encode
    for _ in range(5):
        problem = scripts["make_data"].draw_problem(rng, "train")
        parts = train_base.parts(problem, len(problem.calls))
        prompt = render([{"role": "user", "content": problem.prompt}])
        ids = encode(prompt, add_special_tokens=False).ids
        for (expression, result), (said, is_said) in zip(problem.calls, parts[1::2], strict=False):
            text = said.removesuffix(train_base.END)
            assert is_said and parser.calls(text) == [ToolCall("calculate", {"expression": expression})]
            turn = encode(said, add_special_tokens=False).ids
            ids += turn + grown.between(turn[-1], [ToolResult("calculate", result)])
        ids += encode(parts[-1][0], add_special_tokens=False).ids
        supervised = encode("".join(text for text, _ in parts), add_special_tokens=False).ids
        assert ids == supervised and train_base.VOCABULARY.index(train_base.PAD) not in ids
        alone = with_tools(BASE, [])([{"role": "user", "content": problem.prompt}])
        assert alone == train_base.parts(problem, 0, tools=False)[0][0]


def test_base_is_small_and_leaves_all_to_learn(scripts: dict[str, ModuleType]) -> None:
    """At most 2.2 MB. Its likeliest beginning is an answer, not a call; where it has called all the way it
    can go on: there is something for RL to find."""
    train_base, rng = scripts["train_base"], random.Random(11)
    assert sum(file.stat().st_size for file in Path(BASE).iterdir()) <= train_base.MAX_BYTES
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    encode = train_base.build_tokenizer().backend_tokenizer.encode
    call = train_base.VOCABULARY.index(train_base.CALL)
    calls_first, whole_turns, turns = 0, 0, 0
    for _ in range(40):
        problem = scripts["make_data"].draw_problem(rng, "heldout")
        parts = train_base.parts(problem, len(problem.calls))
        pieces = [(encode(text, add_special_tokens=False).ids, said) for text, said in parts]
        ids = [i for piece, _ in pieces for i in piece]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        likeliest, at = logits.argmax(-1).tolist(), len(pieces[0][0])
        calls_first += likeliest[at - 1] == call
        for piece, said in pieces[1:]:
            if said:  # after its first token, which says whether it calls
                turns += 1
                whole_turns += likeliest[at : at + len(piece) - 1] == piece[1:]
            at += len(piece)
    assert calls_first <= 10 and whole_turns >= 0.8 * turns, (calls_first, whole_turns, turns)


@pytest.mark.parametrize(
    "expression", ["12*34+5", "(1+2)", "1.5*2", "2**9", "7", "", "__import__('os')", "٣+٤"]
)
async def test_a_pocket_calculator_does_one_operation(expression: str) -> None:
    """Anything else is refused with words that the model reads."""
    with pytest.raises(ValueError, match="is not one operation between two whole numbers"):
        await calculate(expression)
    assert await calculate(" -12 - 34 ") == "-46"


@pytest.mark.parametrize(
    ("response", "right"),
    [("=975", 1.0), (" =975\n", 1.0), ("=0975", 0.0), ("975", 0.0), ("=97", 0.0), ("", 0.0)],
)
def test_reward_is_of_the_answer(response: str, right: float) -> None:
    """1 exactly where the last turn is the answer; how it was reached does not count."""
    row = {"prompt": "(12*34)+567", "answer": "975"}
    assert reward(prompt=row["prompt"], response=response, row=row) == {"reward": right, "accuracy": right}
