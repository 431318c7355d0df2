"""The tool and the reward of the shipped calculator example; pure, no torch."""

import operator
import re

_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_OPERATION = re.compile(r"\s*(-?\d{1,18})\s*([-+*])\s*(-?\d{1,18})\s*", re.ASCII)


async def calculate(expression: str) -> str:
    """A pocket calculator.

    Args:
        expression: one operation between two whole numbers, with +, - or *, for example 12*34
    """
    found = _OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError(f"{expression[:40]!r} is not one operation between two whole numbers")
    left, sign, right = found.groups()
    return str(_SIGNS[sign](int(left), int(right)))


def reward(*, prompt: str, response: str, row: dict) -> dict[str, float]:
    """1 if `response`, the model's last turn, is `=` and `row["answer"]` and nothing else, else 0.

    Returns `reward` and `accuracy`, which are the same. Raises KeyError if the row has no answer.
    """
    right = float(response.strip() == f"={row['answer']}")
    return {"reward": right, "accuracy": right}
