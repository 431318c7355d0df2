"""The mathematics reward, by real math-verify in real reward workers: equal as mathematics, safe against what
hangs."""

import asyncio

import pytest

from laminar_hpc.config.schema import RewardConfig
from laminar_hpc.environments.math import gold, reward
from laminar_hpc.environments.reward_pool import RewardPool

CASES = [
    ("Natalia sold 48/2 = 24 clips in May.\n#### 72", "So 48 + 24 = 72 clips. The answer is 72.", 1.0),
    ("#### 1,234", "The total is \\boxed{1234}", 1.0),
    ("#### 72", "First 72, then 71. The answer is 71.", 0.0),
    ("34", "Thus $x = 34$.\n\nAnswer: \\boxed{34}", 1.0),
    ("\\frac{1}{2}", "we get \\boxed{0.5}", 1.0),
    ("$x^2 + 1$", "it is \\boxed{1 + x^2}", 1.0),
    ("-3", "the answer is 3", 0.0),
    (42, "42", 1.0),
    ("7", "I do not know", 0.0),
    ("7", "", 0.0),
]


@pytest.mark.parametrize(("answer", "response", "right"), CASES)
def test_answers(answer, response, right):
    """Which response counts as right, and as answered."""
    scored = reward(prompt="", response=response, row={"answer": answer})
    assert (scored["reward"], scored["accuracy"]) == (right, right)
    assert scored["answered"] == float(any(c.isdigit() for c in response))


def test_a_response_runs_no_code(tmp_path):
    """Expressions are read by a grammar of LaTeX, or consist of digits and operators: nothing of a response
    reaches Python's eval."""
    mark = tmp_path / "ran"
    code = f"__import__('pathlib').Path('{mark}').touch()"
    for response in (code, f"\\boxed{{{code}}}", f"${code}$", f"the answer is {code}", f"1+{code}"):
        reward(prompt="", response=response, row={"answer": "1"})
    assert not mark.exists()


def test_a_row_without_an_answer_is_an_error():
    """A row without a gold answer raises, rather than scoring 0."""
    with pytest.raises(KeyError):
        reward(prompt="", response="1", row={})
    with pytest.raises(ValueError, match="finds no answer"):
        gold("#### ")


@pytest.mark.timeout(240)
async def test_in_reward_workers():
    """Many at once, every score is right; a response on which sympy hangs costs only itself, by
    reward.timeout_seconds."""
    config = RewardConfig(
        function="laminar_hpc.environments.math.reward", workers=1, slots=16, timeout_seconds=20.0
    )
    pool = RewardPool(config)
    await pool.start()
    try:
        calls = [(response, answer, right) for answer, response, right in CASES] * 10
        scores = await asyncio.gather(
            *(pool.score("", response, {"answer": answer}) for response, answer, _ in calls)
        )
        assert [(s.error, s.reward) for s in scores] == [("", right) for *_, right in calls]
    finally:
        await pool.close()
    pool = RewardPool(RewardConfig(function=config.function, timeout_seconds=3.0))
    await pool.start()
    try:
        stuck = pool.score("", "\\boxed{9^{9^{9^{9}}}+1}", {"answer": "5"})
        found = await asyncio.gather(
            stuck, *(pool.score("", "so 72", {"answer": "#### 72"}) for _ in range(8))
        )
        assert (found[0].reward, found[0].error) == (0.0, "no result within 3 s")
        assert [(s.error, s.reward) for s in found[1:]] == [("", 1.0)] * 8
    finally:
        await pool.close()
