"""The reward for programs: the tests of common data sets, in the real sandbox and in real reward workers."""

import asyncio
import json

import pytest
from aiohttp import web

from laminar_hpc.config.schema import RewardConfig
from laminar_hpc.environments.code import OUTPUT_BYTES, CodeReward, last_program
from laminar_hpc.environments.code_cases import Case, cases_of, same_output
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.environments.sandbox import Limits, Result, Sandbox, SandboxFailed
from laminar_hpc.environments.sandbox.fusion import SandboxFusion

SUM = "So:\n```python\nprint(sum(map(int, input().split())))\n```\nDone."
DOUBLE = """```python
class Solution:
    def twice(self, xs: List[int]) -> List[int]:
        return [2 * x for x in xs]
```"""
TWICE = {"fn_name": "twice", "inputs": [[[1]]], "outputs": [[[2]]]}
WRONG = [{"input": "1 2", "output": "3"}, {"input": "1 2", "output": "4"}]
MBPP = {"test_list": ["assert f(1) == 2"]}
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = [
    {"input": "[1, 2]", "output": "[2, 4]", "testtype": "functional", "metadata": {"func_name": "twice"}}
]
CASES = [
    ("sums, JSON text as in verl", {"reward_model": {"ground_truth": json.dumps(SUMS)}}, SUM, 1.0, 1.0),
    ("sums, as in APPS", {"input_output": json.dumps(SUMS)}, SUM, 1.0, 1.0),
    ("sums, as in CodeContests", {"public_tests": {"input": ["1 2"], "output": ["3"]}}, SUM, 1.0, 1.0),
    ("one is wrong", {"tests": WRONG}, SUM, 0.0, 0.5),
    ("calls, as in LiveCodeBench", {"tests": CALLS}, DOUBLE, 1.0, 1.0),
    ("calls, as in TACO", {"tests": TWICE}, DOUBLE, 1.0, 1.0),
    ("asserts, as in MBPP", MBPP, "```\ndef f(x):\n    return x + 1\n```", 1.0, 1.0),
    ("an assert fails", MBPP, "```\ndef f(x):\n    return x\n```", 0.0, 0.0),
    ("leaves before the assert", MBPP, "```\nimport os\nos._exit(0)\n```", 0.0, 0.0),
    ("no program", {"tests": SUMS}, "print(3)", 0.0, 0.0),
    ("raises", {"tests": SUMS}, "```python\n1 / 0\n```", 0.0, 0.0),
]  # fmt: skip


FUTURE = "```python\nfrom __future__ import annotations\n" + DOUBLE.removeprefix("```python\n")
NUMPY = "```python\nimport numpy as np\ndef twice(xs):\n    return [np.int64(2 * x) for x in xs]\n```"
NODE = "class Node:\n    def __init__(self, x):\n        self.x = x\ndef f(n):\n    return math.ceil(n.x)\n"
SHOWN = DOUBLE + "\nIt prints\n```\n[2]\n```"
NAMELESS = [{"input": "[1, 2]", "output": "[2, 4]", "testtype": "functional"}]
RANGE = {"fn_name": "f", "inputs": [[3]], "outputs": [[0, 1, 2]]}
MANY = "\n".join(map(str, range(100_000)))
SETUP = {
    "test_imports": ["import math"],
    "test_setup_code": "n = Node(1.5)",
    "test_list": ["assert f(n) == 2"],
}
CASES += [
    ("begins with __future__", {"tests": TWICE}, FUTURE, 1.0, 1.0),
    ("asserts with imports and a set-up", SETUP, f"```python\n{NODE}```", 1.0, 1.0),
    ("asserts with imports, begins with __future__", SETUP,
     f"```python\nfrom __future__ import annotations\n{NODE}```", 1.0, 1.0),
    ("a name in the row's metadata, as in LiveCodeBench",
     {"tests": NAMELESS, "metadata": '{"func_name": "twice"}'}, DOUBLE, 1.0, 1.0),
    ("a name in the code to begin with",
     {"tests": NAMELESS, "starter_code": "class Solution:\n    def twice(self, xs):"}, DOUBLE, 1.0, 1.0),
    ("output shown behind the program", {"tests": TWICE}, SHOWN, 1.0, 1.0),
    ("returns a range", {"tests": RANGE}, "```python\ndef f(n):\n    return range(n)\n```", 1.0, 1.0),
    ("returns another", {"tests": RANGE}, "```python\ndef f(n):\n    return range(1, n)\n```", 0.0, 0.0),
    ("returns numbers of numpy", {"tests": TWICE}, NUMPY, 1.0, 1.0),
    ("returns no value", {"tests": RANGE}, "```python\ndef f(n):\n    return object()\n```", 0.0, 0.0),
    ("returns a fraction", {"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [[0.5]]}},
     "```python\nfrom fractions import Fraction\ndef f(n):\n    return Fraction(1, 2)\n```", 1.0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "response", "right", "passed"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_forms_of_tests(row, response, right, passed, sandbox):
    """Which program counts as right, by the forms that data sets have."""
    scored = asyncio.run(CodeReward(sandbox)(prompt="", response=response, row=row))
    assert (scored["reward"], scored["accuracy"], scored["passed"]) == (right, right, passed)
    assert scored["answered"] == float("```" in response)


@pytest.fixture(scope="module")
def sandbox():
    """Without preloaded modules it is there at once."""
    with Sandbox(preload=()) as made:
        yield made


def test_a_program_without_end_is_told_apart(sandbox):
    """It fails its test at the time limit, and that is a part of the reward."""
    slow = CodeReward(sandbox, timeout_seconds=0.3)
    scored = asyncio.run(slow(prompt="", response="```python\nwhile True: pass\n```", row={"tests": SUMS}))
    assert (scored["reward"], scored["timed_out"]) == (0.0, 1.0)


def test_long_outputs():
    """A program is right by an output of half a megabyte, and wrong by another. Where the sandbox keeps less
    than the test wants that is an error, and not the program's."""
    right = "```python\nfor i in range(100_000): print(i)\n```"
    listed = "```python\ndef f(n):\n    return range(n)\n```"
    calls = {"fn_name": "f", "inputs": [[100_000]], "outputs": [[list(range(100_000))]]}
    for row, response in (({"tests": [{"input": "", "output": MANY}]}, right), ({"tests": calls}, listed)):
        with (
            Sandbox(preload=(), limits=Limits(output_bytes=OUTPUT_BYTES)) as large,
            Sandbox(preload=()) as small,
        ):
            score = CodeReward(large)
            assert asyncio.run(score(prompt="", response=response, row=row))["reward"] == 1.0
            wrong = response.replace("range(", "range(1, ")
            assert asyncio.run(score(prompt="", response=wrong, row=row))["reward"] == 0.0
            with pytest.raises(SandboxFailed, match=r"Limits\.output_bytes"):
                asyncio.run(CodeReward(small)(prompt="", response=response, row=row))
    with Sandbox(preload=()) as small:
        short = {"tests": [{"input": "", "output": "1"}]}
        assert asyncio.run(CodeReward(small)(prompt="", response=right, row=short))["reward"] == 0.0


def test_rows_without_tests_are_errors():
    """They raise, rather than scoring 0."""
    with pytest.raises(KeyError):
        cases_of({"question": "?"})
    for wrong in ("[]", "3", '[{"input": 1}]', NAMELESS):
        with pytest.raises((ValueError, KeyError)):
            cases_of({"tests": wrong})


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("10", "10.0", True),
        ("10.0", "10", False),
        ("YES", "yes", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_by_words(said, wanted, same):
    """Blanks and the last digits of fractions do not count."""
    assert same_output(said, wanted) is same


@pytest.mark.parametrize("said", ["9" * 400, "[" * 50_000, "-", "", "NaN", "[1.5, 1.5]"])
def test_whatever_a_program_says_of_a_fraction(said):
    """Another value, however large or deep, is wrong; it is no failure of the reward."""
    case, mark = Case(function="f", value=1.5), "mark"
    result = Result(f"\n{mark}{said}", "", 0, False, False, 0.1)
    assert case.passed(result, mark) is False
    assert case.passed(Result(f"\n{mark}1.5000001", "", 0, False, False, 0.1), mark)


def test_the_last_python_block_is_the_program():
    """Blocks of other languages, and one that is cut off, are none; one without a language is, where none is
    said to be Python."""
    assert last_program("```python\nx = 1\n```\nor\n```py\nx = 2\n```") == "x = 2\n"
    assert last_program("```bash\nls\n```") is None and last_program("```python\nx = 1\n") is None


async def test_in_reward_workers():
    """As a run calls it: the workers share one preloaded process, which ends with the pool."""
    pool = RewardPool(
        RewardConfig(function="laminar_hpc.environments.code.reward", workers=2, timeout_seconds=60.0)
    )
    await pool.start()
    try:
        scores = await asyncio.gather(*(pool.score("", SUM, {"tests": SUMS}) for _ in range(8)))
        assert [(s.error, s.reward, s.parts["passed"]) for s in scores] == [("", 1.0, 1.0)] * 8
        missing = await pool.score("", SUM, {})
        assert missing.error == "KeyError: 'tests'"
    finally:
        await pool.close()


async def test_a_sandbox_behind_a_url():
    """What is asked of a server that speaks SandboxFusion's protocol, and what is made of its answers. The
    server is a stand-in with that project's answers."""
    asked = []

    async def run_code(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        code = asked[-1]["code"]
        ran = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "3\n", "stderr": ""}
        if "1 / 0" in code:
            ran |= {"return_code": 1, "stdout": "", "stderr": "ZeroDivisionError"}
        if "while" in code:
            ran = {
                "status": "TimeLimitExceeded",
                "execution_time": None,
                "return_code": None,
                "stdout": "",
                "stderr": "",
            }
        status = "SandboxError" if "broken" in code else "Success" if ran["return_code"] == 0 else "Failed"
        answer = json.dumps({"status": status, "message": "no room", "run_result": ran}).encode()
        response = web.StreamResponse()
        await response.prepare(request)
        for part in (answer[:20], answer[20:]):  # as a large one comes
            await response.write(part)
            await asyncio.sleep(0.02)
        return response

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        remote = SandboxFusion(url)
        fine = await remote.run("print(input())", "3", 4.0)
        assert (fine.stdout, fine.exit, fine.timed_out, fine.seconds) == ("3\n", 0, False, 0.1)
        assert (
            asked[0]["stdin"] == "3" and asked[0]["run_timeout"] == 4.0 and asked[0]["language"] == "python"
        )
        assert (await remote.run("1 / 0")).stderr == "ZeroDivisionError"
        assert (await remote.run("while True: pass")).timed_out
        with pytest.raises(SandboxFailed, match="no room"):
            await remote.run("broken")
        scored = await CodeReward(remote)(
            prompt="", response=SUM, row={"tests": [{"input": "1 2", "output": "3"}]}
        )
        assert scored["reward"] == 1.0
    finally:
        await runner.cleanup()
    with pytest.raises(SandboxFailed, match="no answer"):
        await remote.run("print(1)")
