"""How often the mathematics reward agrees with a person, and how long it takes, beside math-verify alone.

    python bench/math_reward.py [--json FILE] [--pairs FILE] [--first N]

The pairs are lines of JSON: `answer` of a row, `response` of a model, and the reward that is `right`.
`agree` is the share of pairs with that reward, `raised` counts calls that raised, `seconds_per_1000` is of
whole calls, the answers unread before. The same for `math_verify.verify(parse(answer), parse(response))` on
the pairs with a field `now`, if there are any: others were made to hang it. Limits: `agree` 0.97, `raised` 0.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import common
from math_verify import parse, verify

from laminar_hpc.environments import math
from laminar_hpc.environments.math_equal import TooLong, limited

PAIRS = common.ROOT / "tests" / "environments" / "data" / "math.jsonl"


def ours(answer: object, response: str) -> float:
    """The reward of this repository."""
    return math.reward(prompt="", response=response, row={"answer": answer})["reward"]


def bare(answer: object, response: str) -> float:
    """What math-verify makes of the two texts as they are."""
    with limited(5.0):
        wanted = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        return float(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))


def judged(score: Callable[[object, str], float], pairs: list[dict]) -> dict[str, float]:
    """Of one way to score, on all pairs."""
    agreed = raised = 0
    begun = time.perf_counter()
    for pair in pairs:
        try:
            agreed += score(pair["answer"], pair["response"]) == pair["right"]
        except (Exception, TooLong):
            raised += 1
    seconds = time.perf_counter() - begun
    return {
        "agree": agreed / len(pairs),
        "raised": raised,
        "seconds_per_1000": 1000 * seconds / len(pairs),
    }


def main() -> None:
    """Measures and prints a row for each."""
    options = common.options_of(__doc__ or "")
    options.add_argument("--pairs", type=Path, default=PAIRS, help="the pairs (default: those of the tests)")
    options.add_argument("--first", type=int, help="so many of them (default: all)")
    chosen = options.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    pairs = [json.loads(line) for line in chosen.pairs.read_text().splitlines()][: chosen.first]
    for score in (ours, bare):  # both grammars are loaded before the clock runs
        score("\\frac{1}{2}", "\\boxed{x^2}")
    figures = judged(ours, pairs)
    alone = judged(bare, [pair for pair in pairs if "now" in pair] or pairs)
    rows = [{"reward": "laminar", **figures}, {"reward": "math-verify", **alone}]
    figures |= {f"math_verify_{name}": value for name, value in alone.items()}
    common.finish(chosen, figures, rows, list(rows[0]))


if __name__ == "__main__":
    main()
