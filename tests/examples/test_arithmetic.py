"""The shipped arithmetic example: its committed data, its base model and its reward."""

import laminar_hpc.machine.compat.torchvision  # noqa: F401  (first: lets transformers import under CPU torch)
from helpers.paths import EXAMPLES

# isort: split
import importlib.util
import itertools
import json
import random
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar_hpc.environments.arithmetic import reward

EXAMPLE = EXAMPLES / "arithmetic"


def load_script(name: str) -> ModuleType:
    """Import a script of the example, which is no package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_data() -> ModuleType:
    return load_script("make_data")


@pytest.fixture(scope="module")
def train_base(make_data: ModuleType) -> ModuleType:
    return load_script("train_base")


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / "data" / f"{name}.jsonl").read_text().splitlines()]


def operands_of(rows: list[dict[str, str]]) -> set[str]:
    return {operand for row in rows for operand in row["prompt"].removesuffix("=").split("+")}


def test_data_regenerates_identically(
    make_data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed data are what the committed script writes, byte for byte."""
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(tmp_path)])
    make_data.main()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / "data" / name).read_bytes()


def test_rows_are_distinct_and_their_answers_right() -> None:
    """Each row's answer is the sum; no row is there twice; at least 512 are held out and a few thousand are
    for training."""
    for name, least in (("train", 2000), ("heldout", 512)):
        rows = rows_of(name)
        assert len({row["prompt"] for row in rows}) == len(rows) >= least
        for row in rows:
            a, b = row["prompt"].removesuffix("=").split("+")
            assert str(int(a) + int(b)) == row["answer"]


def supervised_texts(train_base: ModuleType, steps: int) -> list[tuple[str, str]]:
    """Prompts and responses, without the end token, of `steps` supervised steps of each phase."""
    text, rng = {i: token for token, i in train_base.TOKEN_ID.items()}, random.Random(7)
    return [
        ("".join(text[i] for i in example.prompt), "".join(text[i] for i in example.response[:-1]))
        for stage in train_base.STAGES
        for phase in stage.phases
        for _ in range(steps)
        for example in train_base.draw_examples(rng, phase)
    ]


def test_heldout_operands_appear_in_no_training_set(train_base: ModuleType) -> None:
    """No number that is an operand in a held-out problem is one in an RL row or in a supervised example."""
    heldout = operands_of(rows_of("heldout"))
    assert not heldout & operands_of(rows_of("train"))
    assert not heldout & operands_of(
        [{"prompt": prompt} for prompt, _ in supervised_texts(train_base, steps=100)]
    )


def test_supervised_examples_are_correct_and_of_both_kinds(train_base: ModuleType) -> None:
    """The base model sees correct responses only, some at once and some worked out, every step of which is
    right."""
    kinds = set()
    for prompt, response in supervised_texts(train_base, steps=10):
        a, b = prompt.removesuffix("=").split("+")
        score = reward(
            prompt=prompt, response=response, row={"prompt": prompt, "answer": str(int(a) + int(b))}
        )
        assert score["reward"] == 1.0
        kinds.add(score["worked"])
        for digits, step in enumerate(response.split(";")[:-1], start=1):
            assert int(step.split("=")[1]) == int(a[-digits:]) + int(b[-digits:])
    assert kinds == {0.0, 1.0}


def test_lengths_are_heavy_tailed(make_data: ModuleType) -> None:
    """Over the worked answers of either file the 99th percentile is at least five times the median, in
    tokens."""
    for name in ("train", "heldout"):
        problems = [
            make_data.Problem(*map(int, row["prompt"].removesuffix("=").split("+"))) for row in rows_of(name)
        ]
        lengths = sorted(len(problem.worked) + 1 for problem in problems)
        assert make_data.percentile(lengths, 0.99) >= 5 * statistics.median(lengths)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EXAMPLE / "base")


def test_base_is_small_and_its_tokenizer_round_trips(make_data: ModuleType, tokenizer) -> None:
    """The base model's directory has at most 2 MB; every character of prompts and responses is one token and
    comes back."""
    assert sum(file.stat().st_size for file in (EXAMPLE / "base").iterdir()) <= 2_000_000
    for row in rows_of("heldout"):
        problem = make_data.Problem(*map(int, row["prompt"].removesuffix("=").split("+")))
        for text in (problem.prompt, problem.at_once, problem.worked):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_mixture_is_made_from_the_base(train_base: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is trained, a mixture computes what the base does; what is shipped is such a model, of at
    most 2 MB, whose experts have become different ones."""
    monkeypatch.setitem(sys.modules, "train_base", train_base)
    script = load_script("train_mixture")
    base = AutoModelForCausalLM.from_pretrained(EXAMPLE / "base", dtype=torch.float32).eval()
    made = script.build_mixture(base).eval()
    tokens = torch.randint(2, 16, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (made(tokens).logits - base(tokens).logits).abs().max() < 1e-3
    shipped = AutoModelForCausalLM.from_pretrained(EXAMPLE / "mixture", dtype=torch.float32)
    assert shipped.config.num_experts == script.EXPERTS and type(shipped) is type(made)
    assert sum(file.stat().st_size for file in (EXAMPLE / "mixture").iterdir()) <= 2_000_000
    experts = shipped.model.layers[0].mlp.experts.down_proj
    assert (experts[0] - experts[1]).abs().max() > 1e-3
    assert (EXAMPLE / "mixture" / "tokenizer.json").read_bytes() == (
        EXAMPLE / "base" / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("name", ["base", "mixture"])
def test_the_models_leave_room_to_learn(name: str, tokenizer) -> None:
    """Decoded greedily, each answers between 20% and 50% of the held-out problems correctly."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / name, dtype=torch.float32)
    rows = sorted(rows_of("heldout"), key=lambda row: len(row["prompt"]))
    num_right = 0.0
    for width, group in itertools.groupby(
        rows, key=lambda row: len(row["prompt"])
    ):  # one length at a time: no padding, no stragglers
        group = list(group)
        prompts = tokenizer([row["prompt"] for row in group], return_tensors="pt")
        tokens = model.generate(**prompts, do_sample=False, max_new_tokens=192)[:, width:]
        responses = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        scores = [
            reward(prompt=row["prompt"], response=text, row=row)
            for row, text in zip(group, responses, strict=True)
        ]
        num_right += sum(score["accuracy"] for score in scores)
    assert 0.2 <= num_right / len(rows) <= 0.5


@pytest.mark.parametrize(
    ("response", "right", "worked"),
    [
        (">91", 1.0, 0.0),
        ("2+9+0=11;1+7+1=091;>91", 1.0, 1.0),
        ("2+9+0=99;>91", 1.0, 1.0),  # the way is not judged
        (">18>91", 1.0, 0.0),  # the last answer counts
        (">91>18", 0.0, 0.0),
        (">9", 0.0, 0.0),
        (">910", 0.0, 0.0),
        (">091", 0.0, 0.0),
        (">91;", 0.0, 0.0),
        ("2+9+0=11;1+7", 0.0, 1.0),  # truncated
        ("91", 0.0, 0.0),  # no answer marked
        (">", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_reward(response: str, right: float, worked: float) -> None:
    """The reward is 1 exactly when the text after the last `>` is the answer; working is counted, not
    rewarded."""
    row = {"prompt": "12+79=", "answer": "91"}
    assert reward(prompt="12+79=", response=response, row=row | {"answer": 91})["reward"] == right
    assert reward(prompt=row["prompt"], response=response, row=row) == {
        "reward": right,
        "accuracy": right,
        "worked": worked,
    }
