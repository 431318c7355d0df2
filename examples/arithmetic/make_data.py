"""Writes the problems of the arithmetic example: `data/train.jsonl` (prompts for RL) and `data/heldout.jsonl`
(for evaluation).

Run by hand (`python examples/arithmetic/make_data.py`); train_base.py imports the problem definitions from
here. Needs only the standard library. Guarantees: the same seed writes the same bytes; every natural number
belongs to exactly one side, so a number that is an operand in a held-out problem is an operand in no training
row, neither here nor in train_base.py.
"""

import argparse
import hashlib
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

SEED = 0
NUM_TRAIN = 4096
NUM_HELDOUT = 512
HELDOUT_SHARE = 0.3  # of the operand values: leaves enough pairs of two-digit numbers on both sides

# Digits of both operands -> share of the problems. The median is 3, and the last 3% make the heavy tail.
DIGIT_SHARES = {2: 0.46, 3: 0.22, 4: 0.12, 5: 0.06, 6: 0.04, 7: 0.04, 9: 0.03, 12: 0.03}

Side = Literal["train", "heldout"]
DATA = Path(__file__).parent / "data"


class Problem(NamedTuple):
    """`a + b`."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def at_once(self) -> str:
        """The short response: `>` and the sum."""
        return f">{self.answer}"

    @property
    def worked(self) -> str:
        """The long response: a step `x+y+carry=total;` per digit, last digit first, then `>` and the sum.

        `total` is the sum of the digits up to here, one digit longer than they are: its first digit is the
        carry.
        """
        steps, total = [], "0"
        for x, y in zip(reversed(str(self.a)), reversed(str(self.b)), strict=True):
            carry, settled = total[0], total[1:]
            total = f"{int(x) + int(y) + int(carry):02d}{settled}"
            steps.append(f"{x}+{y}+{carry}={total};")
        return "".join(steps) + self.at_once


def side_of(value: int, seed: int = SEED) -> Side:
    """The one side on which `value` may be an operand."""
    digest = hashlib.sha256(f"{seed}:{value}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64 else "train"


def draw_operand(rng: random.Random, digits: int, side: Side, seed: int = SEED) -> int:
    """A uniform draw among the numbers of exactly `digits` digits that belong to `side`."""
    while True:
        value = rng.randrange(10 ** (digits - 1), 10**digits)
        if side_of(value, seed) == side:
            return value


def draw_problem(
    rng: random.Random, side: Side, seed: int = SEED, digit_shares: dict[int, float] = DIGIT_SHARES
) -> Problem:
    """A problem of `side` whose operands have equally many digits, drawn by `digit_shares`."""
    digits = rng.choices(list(digit_shares), weights=list(digit_shares.values()))[0]
    return Problem(draw_operand(rng, digits, side, seed), draw_operand(rng, digits, side, seed))


def distinct_problems(side: Side, count: int, seed: int = SEED) -> list[Problem]:
    """`count` distinct problems of `side` in a random order, with DIGIT_SHARES met exactly up to rounding."""
    rng = random.Random(f"{side}:{seed}")
    problems: dict[Problem, None] = {}
    for digits, quota in _quotas(count).items():
        wanted = len(problems) + quota
        for _ in range(100 * quota):
            if len(problems) == wanted:
                break
            problems[draw_problem(rng, side, seed, {digits: 1.0})] = None
        else:
            raise SystemExit(
                f"seed {seed} leaves fewer than {quota} {side} problems of {digits} digits: take another seed"
            )
    shuffled = list(problems)
    rng.shuffle(shuffled)
    return shuffled


def _quotas(count: int) -> dict[int, int]:
    quotas = {digits: int(count * share) for digits, share in DIGIT_SHARES.items()}
    quotas[min(quotas)] += count - sum(quotas.values())
    return quotas


def percentile(values: list[int], share: float) -> int:
    """The smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def operands(problems: list[Problem]) -> set[int]:
    return {value for problem in problems for value in problem}


def _rows(problems: list[Problem]) -> Iterator[str]:
    for problem in problems:
        yield json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n"


def _report(name: str, problems: list[Problem]) -> None:
    lengths = [
        len(problem.worked) + 1 for problem in problems
    ]  # a character is a token; one more ends the response
    median, p99 = statistics.median(lengths), percentile(lengths, 0.99)
    digits = dict(sorted(Counter(len(str(problem.a)) for problem in problems).items()))
    print(f"{name}: {len(problems)} problems, operand digits {digits}")
    print(
        f"  worked answers, tokens: mean {statistics.mean(lengths):.1f}, median {median:g}, p99 {p99} "
        f"({p99 / median:.1f}x median)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()

    train = distinct_problems("train", NUM_TRAIN, args.seed)
    heldout = distinct_problems("heldout", NUM_HELDOUT, args.seed)
    shared = operands(train) & operands(heldout)
    if shared:
        raise SystemExit(
            f"{len(shared)} operands are on both sides, for example {min(shared)}: side_of is broken"
        )

    args.out.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", train), ("heldout", heldout)):
        (args.out / f"{name}.jsonl").write_text("".join(_rows(problems)))
        _report(name, problems)
    print(f"operands: {len(operands(train))} in train, {len(operands(heldout))} in heldout, 0 in both")


if __name__ == "__main__":
    main()
