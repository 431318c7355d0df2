"""Writes the problems of the calculator example: `data/train.jsonl` (prompts for RL) and `data/heldout.jsonl`
(for evaluation).

Run by hand (`python examples/calculator/make_data.py`); train_base.py imports the problems and the calls that
solve them from here. Needs only the standard library. Guarantees: the same seed writes the same bytes; a hash
puts every problem on one side, so a held-out problem is no training row, neither here nor in train_base.py.
"""

import argparse
import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

SEED = 0
NUM_TRAIN = 4096
NUM_HELDOUT = 256
HELDOUT_SHARE = 0.2  # of all problems

# What is to be worked out, `@` for each operand -> share of the problems. Inner brackets come first.
SHAPES = {"(@ @)@": 0.3, "@(@ @)": 0.2, "((@ @)@)@": 0.3, "(@ @)(@ @)": 0.2}
OPERANDS = range(12, 100)
LARGEST = 10**6  # of any result

Side = Literal["train", "heldout"]
DATA = Path(__file__).parent / "data"


class Problem(NamedTuple):
    """`prompt` as the user writes it; `calls`: (expression, result) of the calculator, one per operation, in
    an order in which each needs only numbers that are there."""

    prompt: str
    calls: tuple[tuple[str, str], ...]

    @property
    def answer(self) -> str:
        return self.calls[-1][1]


class Drawn(NamedTuple):
    """A part of a problem: its text in brackets, its value, the calls for it."""

    text: str
    value: int
    calls: tuple[tuple[str, str], ...] = ()


def draw_problem(rng: random.Random, side: Side, shape: str = "", seed: int = SEED) -> Problem:
    """A problem of `side`, of one of SHAPES drawn by its share unless it is given."""
    while True:
        wanted = shape or rng.choices(list(SHAPES), weights=list(SHAPES.values()))[0]
        drawn = _draw(rng, wanted)
        if drawn is not None and side_of(drawn.text, seed) == side:
            return Problem(drawn.text, drawn.calls)


def side_of(prompt: str, seed: int = SEED) -> Side:
    """The one side on which `prompt` may be."""
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"


def _draw(rng: random.Random, shape: str) -> Drawn | None:
    """None where no operation gives a number from 0 to LARGEST."""

    def operand() -> Drawn:
        value = rng.choice(OPERANDS)
        return Drawn(str(value), value)

    def both(left: Drawn | None, right: Drawn | None) -> Drawn | None:
        return left and right and _together(rng, left, right)

    def bracket(inner: Drawn | None) -> Drawn | None:
        return inner and inner._replace(text=f"({inner.text})")

    pair = bracket(both(operand(), operand()))
    if shape == "(@ @)@":
        return both(pair, operand())
    if shape == "@(@ @)":
        return both(operand(), pair)
    if shape == "((@ @)@)@":
        return both(bracket(both(pair, operand())), operand())
    return both(pair, bracket(both(operand(), operand())))


def _together(rng: random.Random, left: Drawn, right: Drawn) -> Drawn | None:
    a, b = left.value, right.value
    values = {"+": a + b, "-": a - b, "*": a * b}
    possible = [sign for sign, value in values.items() if 0 <= value < LARGEST]
    if not possible:
        return None
    sign = rng.choice([*possible, "*"] if "*" in possible else possible)  # what no head can do is frequent
    call = (f"{a}{sign}{b}", str(values[sign]))
    return Drawn(f"{left.text}{sign}{right.text}", values[sign], (*left.calls, *right.calls, call))


def distinct_problems(side: Side, count: int, seed: int = SEED) -> list[Problem]:
    """`count` distinct problems of `side` in a random order."""
    rng = random.Random(f"{side}:{seed}")
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[draw_problem(rng, side, seed=seed)] = None
    return list(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for side, count in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        problems = distinct_problems(side, count, args.seed)
        rows = (json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems)
        (args.out / f"{side}.jsonl").write_text("".join(f"{row}\n" for row in rows))
        calls = dict(sorted(Counter(len(problem.calls) for problem in problems).items()))
        print(f"{side}: {len(problems)} problems, by number of operations {calls}")


if __name__ == "__main__":
    main()
