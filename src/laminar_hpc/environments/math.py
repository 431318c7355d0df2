"""The reward for mathematics: does the response's final answer equal the row's, as mathematics (1/2 = 0.5 =
\\frac{1}{2})? `math_text` finds the answer, `math_reading` says what it can mean, `math_equal` compares."""

import logging
import re
from functools import lru_cache
from typing import Any

import sympy

from laminar_hpc.environments.math_equal import TooLong, limited
from laminar_hpc.environments.math_reading import Reading, Readings, read, same
from laminar_hpc.environments.math_text import NUMBER, boxes, final_answer, spelled

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
_SECONDS = 3.0  # for one response


def reward(*, prompt: str, response: str, row: dict) -> dict[str, float]:
    """Scores the final answer of `response` against `row["answer"]`: a number, LaTeX, words, a list of
    answers that are all wanted, or a worked solution that ends in "#### 42" or a box.

    Returns `reward` and `accuracy` (1.0 if equal, else 0.0) and `answered` (1.0 if an answer was found). What
    takes longer than a few seconds to compare is not equal. Raises KeyError if the row has no answer.
    """
    wanted, answer, right = row["answer"], "", False
    try:
        with limited(_SECONDS):
            answer = final_answer(response)
            right = bool(answer) and _equals(wanted, answer)
    except (TooLong, Exception) as error:  # a response is never the cause of an error
        logging.getLogger(__name__).debug("not compared: %r", error)
    return {"reward": float(right), "accuracy": float(right), "answered": float(bool(answer))}


def _equals(wanted: Any, answer: str) -> bool:
    text, meant = gold(wanted)
    plain, bare = (re.sub(r" (?=\W)|(?<=\W) ", "", each) for each in (text, answer))
    if meant and bare in (plain, re.sub(r"_\{?\w+\}?$", "", text)):  # a base may be left out
        return True
    said = read(answer)
    european = re.sub(r"^(-?\d+),(?!\d{3}\b)(?=\d+\D*$)", r"\1.", answer)
    if european != answer and not any(isinstance(each.value, tuple) for each in meant):
        said += read(european)  # 1,5 is 1.5 where no list is wanted
    if [type(each.value) for each in said] == [str] and len(found := NUMBER.findall(answer)) == 1:
        said += read(found[0]) if "date" not in said[0].value else ()
    if isinstance(wanted, float) and any(
        isinstance(each.value, sympy.Rational) and float(each.value) == wanted for each in said
    ):
        return True  # 0.3333333333333333 is what a float has of 1/3
    return same(meant, said)


@lru_cache(maxsize=1 << 16)
def _gold(answer: str) -> tuple[str, Readings]:
    final = answer.rpartition("####")[2]
    text = spelled(boxes(final) or final)
    return text, read(text)


def gold(answer: Any) -> tuple[str, Readings]:
    """The text of a row's answer, as far as it counts, and its readings; none if it has no answer."""
    if isinstance(answer, list) and len(answer) != 1:
        return "", (Reading(tuple(gold(each)[1] for each in answer)),)
    return gold(answer[0]) if isinstance(answer, list) else _gold(str(answer))


def readable(*, prompt: str, response: str, row: dict) -> float:
    """1.0. Raises ValueError for a row by whose answer few or none can be right: it says nothing, or is a
    text that holds a number."""
    text, meant = gold(row.get("answer"))
    if not meant or text.casefold() in ("none", "nan", "null"):
        raise ValueError("is no answer")
    words = all(isinstance(each.value, str) and not each.name and "date" not in each.value for each in meant)
    if words and re.search(r"\d", text):
        raise ValueError("is read as mere text")
    return 1.0
