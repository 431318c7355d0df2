"""The reward of the shipped arithmetic example. Reward workers call `reward` on every finished trajectory;
pure, no torch.

A response is right if what stands after its last `>` is the answer, digit for digit. How the answer was
reached (at once, `>91`, or worked out, `2+9+0=11;1+7+1=091;>91`) is counted but not rewarded.
"""


def reward(*, prompt: str, response: str, row: dict) -> dict[str, float]:
    """Score `response`, the decoded text without the end token, against `row["answer"]`.

    A truncated response is scored like any other, so it is right only if it already ends in the answer.
    Returns `reward` and `accuracy` (1.0 if right, else 0.0) and `worked` (1.0 if the response has a step,
    `;`, before its answer). Raises KeyError if the row has no answer.
    """
    answer = str(row["answer"])  # a data file may have numbers
    steps, mark, final = response.rpartition(">")
    right = float(mark == ">" and final == answer)
    worked = float(";" in (steps if mark else response))
    return {"reward": right, "accuracy": right, "worked": worked}
