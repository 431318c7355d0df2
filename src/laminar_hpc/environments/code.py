"""The reward for programs: does the response's Python pass the row's tests? Each test runs in the sandbox.

`reward` is for the command line. `CodeReward` makes one with another sandbox, time limit or number of tests,
in a module of your own:

    score = CodeReward(SandboxFusion("http://127.0.0.1:8080"), timeout_seconds=10)
"""

import re
from typing import Protocol

from laminar_hpc.environments.code_cases import cases_of
from laminar_hpc.environments.sandbox import Limits, Result, Sandbox

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S)
_PYTHON = ("python", "python3", "py")
OUTPUT_BYTES = 4 << 20  # kept of each stream: tests of sorting want some hundred thousand numbers


class Runner(Protocol):
    """What runs programs: Sandbox or SandboxFusion."""

    async def run(self, code: str, stdin: str = "", timeout_seconds: float = 10.0) -> Result: ...


class CodeReward:
    """1.0 if the program passes all of the row's tests, else 0.0.

    `timeout_seconds` is for each test; `most_tests` of a row are run, the first ones. Tests run one after the
    other and end with the first that fails. Parts: `accuracy`, as the reward; `answered`, whether there is a
    program; `passed`, the share of tests before the first that failed; `timed_out`, whether that one took too
    long. Raises KeyError or ValueError for a row without tests, SandboxFailed where the sandbox cannot run.
    """

    def __init__(
        self, sandbox: Runner | None = None, timeout_seconds: float = 6.0, most_tests: int = 32
    ) -> None:
        self._sandbox = sandbox or Sandbox(limits=Limits(output_bytes=OUTPUT_BYTES))
        self._seconds = timeout_seconds
        self._most = most_tests

    def prepare(self) -> None:
        """Called once, before workers are forked: they share one preloaded process."""
        if isinstance(self._sandbox, Sandbox):
            self._sandbox.start()

    async def __call__(self, *, prompt: str, response: str, row: dict) -> dict[str, float]:
        tests, code = cases_of(row)[: self._most], last_program(response)
        passed, timed_out = 0, False
        for test in tests if code is not None else ():
            program, mark = test.program(code or "")
            result = await self._sandbox.run(program, test.stdin, self._seconds)
            if not test.passed(result, mark):
                timed_out = result.timed_out
                break
            passed += 1
        right = float(passed == len(tests))
        return {
            "reward": right,
            "accuracy": right,
            "answered": float(code is not None),
            "passed": passed / len(tests),
            "timed_out": float(timed_out),
        }


def last_program(response: str) -> str | None:
    """The last fenced block of Python, else the last of no named language; None if there is neither."""
    blocks = [(found[1].lower(), found[2]) for found in _BLOCK.finditer(response)]
    named = [text for language, text in blocks if language in _PYTHON]
    plain = [text for language, text in blocks if not language]
    return next(iter([*named[::-1], *plain[::-1]]), None)


reward = CodeReward()
