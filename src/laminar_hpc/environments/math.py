"""The reward for mathematics: does the response's final answer equal the row's, as mathematics (1/2 = 0.5 =
\\frac{1}{2})? By math-verify.

math-verify's own time limits use signals, which only a main thread may have; they are off here, and
reward.timeout_seconds holds: a call that is stuck in sympy costs its worker process, never the rollout.
"""

import logging
from functools import lru_cache

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off


def reward(*, prompt: str, response: str, row: dict) -> dict[str, float]:
    """Scores `response` against `row["answer"]`: a number, LaTeX, or a worked solution that ends in "#### 42"
    as in GSM8K.

    Of the response the last boxed expression counts, else the last number or LaTeX expression. Returns
    `reward` and `accuracy` (1.0 if equal, else 0.0) and `answered` (1.0 if an answer was found). Raises
    KeyError if the row has no answer, ValueError if it is none.
    """
    right_answer = gold(str(row["answer"]))
    answer = parse(response, parsing_timeout=None)
    right = float(bool(answer) and verify(list(right_answer), answer, timeout_seconds=None))
    return {"reward": right, "accuracy": right, "answered": float(bool(answer))}


@lru_cache(maxsize=4096)
def gold(answer: str) -> tuple:
    """What math-verify makes of a row's answer: expressions and their text. Raises ValueError when that is
    nothing."""
    final = answer.rpartition("####")[2].strip()
    boxed = "\\boxed" in final or "$" in final
    parsed = parse(final if boxed else f"\\boxed{{{final}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"math-verify finds no answer in {final!r:.60}")
    return tuple(parsed)
