"""The shipped arithmetic example: its committed data, its base model and its reward."""

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType

import laminar_hpc.compat.torchvision  # noqa: F401  (before transformers)
import pytest
import torch
from laminar_hpc.environments.arithmetic import reward
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


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


def test_data_regenerates_identically(make_data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed data are what the committed script writes, byte for byte."""
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(tmp_path)])
    make_data.main()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / "data" / name).read_bytes()


def test_rows_are_distinct_and_their_answers_right() -> None:
    """Each row's answer is the sum; no row is there twice; at least 512 are held out and a few thousand are for training."""
    for name, least in (("train", 2000), ("heldout", 512)):
        rows = rows_of(name)
        assert len({row["prompt"] for row in rows}) == len(rows) >= least
        for row in rows:
            a, b = row["prompt"].removesuffix("=").split("+")
            assert str(int(a) + int(b)) == row["answer"]


def test_heldout_operands_appear_in_no_training_set(train_base: ModuleType) -> None:
    """No number that is an operand in a held-out problem is one in an RL row or in 20,000 supervised examples of each phase."""
    import random

    heldout = operands_of(rows_of("heldout"))
    assert not heldout & operands_of(rows_of("train"))
    text = {i: token for token, i in train_base.TOKEN_ID.items()}
    for phase in train_base.PHASES:
        rng = random.Random(7)
        prompts = ["".join(text[i] for i in train_base.draw_example(rng, phase.worked_share).prompt) for _ in range(20_000)]
        assert not heldout & operands_of([{"prompt": prompt} for prompt in prompts])


def test_supervised_examples_are_correct_and_of_both_kinds(train_base: ModuleType) -> None:
    """The base model sees correct responses only, some at once and some worked out, every step of which is right."""
    import random

    rng, text, kinds = random.Random(3), {i: token for token, i in train_base.TOKEN_ID.items()}, set()
    for _ in range(2000):
        example = train_base.draw_example(rng, 0.5)
        prompt, response = ("".join(text[i] for i in ids) for ids in (example.prompt, example.response[:-1]))
        a, b = prompt.removesuffix("=").split("+")
        score = reward(prompt=prompt, response=response, row={"prompt": prompt, "answer": str(int(a) + int(b))})
        assert score["reward"] == 1.0
        kinds.add(score["worked"])
        for step in response.split(";")[:-1]:
            terms, total = step.split("=")
            assert sum(map(int, terms.split("+"))) == int(total)
    assert kinds == {0.0, 1.0}


def test_lengths_are_heavy_tailed(make_data: ModuleType) -> None:
    """Over the worked answers of either file the 99th percentile is at least five times the median, in tokens."""
    for name in ("train", "heldout"):
        problems = [make_data.Problem(*map(int, row["prompt"].removesuffix("=").split("+"))) for row in rows_of(name)]
        lengths = sorted(len(problem.worked) + 1 for problem in problems)
        assert make_data.percentile(lengths, 0.99) >= 5 * statistics.median(lengths)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EXAMPLE / "base")


def test_base_is_small_and_its_tokenizer_round_trips(make_data: ModuleType, tokenizer) -> None:
    """The base model's directory has at most 2 MB; every character of prompts and responses is one token and comes back."""
    assert sum(file.stat().st_size for file in (EXAMPLE / "base").iterdir()) <= 2_000_000
    for row in rows_of("heldout"):
        problem = make_data.Problem(*map(int, row["prompt"].removesuffix("=").split("+")))
        for text in (problem.prompt, problem.at_once, problem.worked):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_base_leaves_room_to_learn(tokenizer) -> None:
    """Decoded greedily, the base model answers between 20% and 50% of the held-out problems correctly."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "base", dtype=torch.float32)
    rows = rows_of("heldout")
    batch = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    tokens = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=192
    )[:, batch["input_ids"].shape[1] :]
    responses = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    scores = [
        reward(prompt=row["prompt"], response=response, row=row)["accuracy"] for row, response in zip(rows, responses, strict=True)
    ]
    assert 0.2 <= statistics.mean(scores) <= 0.5


@pytest.mark.parametrize(
    ("response", "right", "worked"),
    [
        (">19", 1.0, 0.0),
        ("2+7+0=09;1+0+0=01;>19", 1.0, 1.0),
        ("2+7+0=99;>19", 1.0, 1.0),  # the way is not judged
        (">18>19", 1.0, 0.0),  # the last answer counts
        (">19>18", 0.0, 0.0),
        (">1", 0.0, 0.0),
        (">190", 0.0, 0.0),
        (">019", 0.0, 0.0),
        (">19;", 0.0, 0.0),
        ("2+7+0=09;1+0", 0.0, 1.0),  # truncated
        ("19", 0.0, 0.0),  # no answer marked
        (">", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_reward(response: str, right: float, worked: float) -> None:
    """The reward is 1 exactly when the text after the last `>` is the answer; working is counted, not rewarded."""
    row = {"prompt": "12+7=", "answer": "19"}
    assert reward(prompt=row["prompt"], response=response, row=row) == {"reward": right, "accuracy": right, "worked": worked}
