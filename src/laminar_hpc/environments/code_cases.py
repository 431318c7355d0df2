"""The tests of a row, in the forms that common data sets have, and whether a program passes one.

| form | data sets |
|---|---|
| `{"inputs": [...], "outputs": [...]}`, with `fn_name` for calls | APPS, TACO, PRIME, verl's ground_truth |
| `{"input": [...], "output": [...]}` | CodeContests (`public_tests`, `private_tests`, `generated_tests`) |
| `[{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...]` | LiveCodeBench, DeepCoder |
| `["assert f(1) == 2", ...]`, after `test_imports` and `test_setup_code` | MBPP (`test_list`) |

Each may be JSON text. Outputs are compared outside of the program, which never has them; only an assert
shows the program what it wants.
"""

import json
import math
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from laminar_hpc.environments.sandbox import Result, SandboxFailed

_FIELDS = ("tests", "test_cases", "input_output", "test_list")
_CODE_CONTESTS = ("public_tests", "private_tests", "generated_tests")
_CUT = 200  # characters at most that a shortened output has of others
_STARTED = re.compile(r"def (\w+)\(self\b")
_TOLERANCE = 1e-6  # of numbers that are not whole
_PRELUDE = (
    "from typing import *\n"
    "import bisect, collections, functools, heapq, itertools, math, random, re, string, sys\n"
    "from collections import *\nfrom functools import *\nfrom itertools import *\nfrom heapq import *\n"
)


@dataclass(frozen=True)
class Case:
    """`stdin` and the wanted `output`; with `function`, its `arguments` and the wanted value; with `check`,
    an assert behind its `setup`."""

    stdin: str = ""
    output: str = ""
    function: str = ""
    arguments: tuple = ()
    value: Any = None
    check: str = ""
    setup: str = ""

    def program(self, code: str) -> tuple[str, str]:
        """What is to be run for this answer, and the mark that its own words cannot have."""
        mark = secrets.token_hex(16)
        if self.check:
            return f"{code}\n{self.setup}\n{self.check}\nprint({mark!r})\n", mark
        if not self.function:
            return code, mark
        given = json.dumps(self.arguments)
        call = (
            "import json as _json\n_where = globals()\n"
            "def _plain(v):\n"  # what JSON does not know: arrays, fractions, ranges
            "    if hasattr(v, 'tolist'): return v.tolist()\n"
            "    return float(v) if hasattr(v, '__float__') else list(v)\n"
            f"_f = getattr(_where['Solution'](), {self.function!r}) if 'Solution' in _where "
            f"else _where[{self.function!r}]\n"
            f"print('\\n' + {mark!r} + _json.dumps(_f(*_json.loads({given!r})), default=_plain))\n"
        )
        alone = (
            f"exec(compile({code!r}, 'answer.py', 'exec', dont_inherit=True))"  # it may begin with __future__
        )
        return f"{_PRELUDE}{alone}\n{call}", mark

    def passed(self, result: Result, mark: str) -> bool:
        """Whether the program did what this test wants. Raises SandboxFailed beyond the sandbox's room."""
        if result.timed_out or result.exit != 0:
            return False
        wanted, kept = (json.dumps(self.value), 2) if self.function else (self.output, 1)
        if result.truncated and len(wanted) > len(result.stdout) // kept - _CUT:
            raise SandboxFailed(
                f"a test wants {len(wanted)} characters of output, the sandbox keeps {len(result.stdout)}; "
                "give CodeReward a sandbox with more Limits.output_bytes"
            )
        if self.check:
            return result.stdout.rstrip().endswith(mark)
        if not self.function:
            return same_output(result.stdout, self.output)
        before, _, said = result.stdout.rpartition(mark)
        try:
            value = json.loads(said)
        except (ValueError, RecursionError):
            return False
        return bool(before) and (_same(value, self.value) or _same([value], self.value))


def cases_of(row: dict) -> list[Case]:
    """Raises KeyError when the row has no tests, ValueError when they have none of these forms."""
    model = row.get("reward_model")
    candidates = [row.get(name) for name in _FIELDS]
    candidates += [model.get("ground_truth") if isinstance(model, dict) else None, row.get("answer")]
    found = [each for each in candidates if each][:1] or [
        row[name] for name in _CODE_CONTESTS if row.get(name)
    ]
    if not found:
        raise KeyError("tests")
    setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
    name = _name_in(row) or (_STARTED.search(row.get("starter_code") or "") or ["", ""])[1]
    tests = [test for each in found for test in _parsed(each, setup, name)]
    if not tests:
        raise ValueError("the row's tests are empty")
    return tests


def _name_in(row: dict) -> str:
    """The function that tests call, as far as `row`, or a test, says it."""
    metadata = row.get("metadata")
    metadata = json.loads(metadata) if isinstance(metadata, str) and metadata[:1] == "{" else metadata
    return row.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, dict) else "") or ""


def _parsed(found: object, setup: str, name: str) -> Iterator[Case]:
    if isinstance(found, str):
        found = json.loads(found)
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        yield from (Case(check=each, setup=setup) for each in found)
    elif isinstance(found, list) and all(isinstance(each, dict) for each in found):
        for each in found:
            called = _name_in(each) or (name if each.get("testtype") == "functional" else "")
            if each.get("testtype") == "functional" and not called:
                raise ValueError("a functional test has no name of a function (fn_name, metadata.func_name)")
            yield _test(each["input"], each["output"], called)
    elif isinstance(found, dict):
        plural = "inputs" in found
        inputs, outputs = (found["inputs"], found["outputs"]) if plural else (found["input"], found["output"])
        for given, wanted in zip(inputs, outputs, strict=True):
            yield _test(given, wanted, found.get("fn_name") or "")
    else:
        raise ValueError(f"the row's tests have no known form: {found!r:.80}")


def _test(given: object, wanted: object, function: str) -> Case:
    if not function:
        return Case(stdin=_lines(given), output=_lines(wanted))
    if isinstance(given, str):  # LiveCodeBench: one JSON value a line
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
    arguments = tuple(given) if isinstance(given, list) else (given,)
    return Case(function=function, arguments=arguments, value=wanted)


def _lines(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def same_output(said: str, wanted: str) -> bool:
    """By lines, without blank ones at the end, and words; decimal numbers may differ by a millionth."""
    lines = [[line.split() for line in text.rstrip().splitlines()] for text in (said, wanted)]
    return len(lines[0]) == len(lines[1]) and all(
        len(mine) == len(theirs) and all(map(_same_word, mine, theirs))
        for mine, theirs in zip(*lines, strict=True)
    )


def _same_word(said: str, wanted: str) -> bool:
    if said == wanted:
        return True
    try:
        return ("." in wanted or "e" in wanted) and _same(float(said), float(wanted))
    except ValueError:
        return False


def _same(said: object, wanted: object) -> bool:
    if isinstance(said, list) and isinstance(wanted, list | tuple):
        return len(said) == len(wanted) and all(map(_same, said, wanted))
    if (
        isinstance(said, int | float)
        and isinstance(wanted, int | float)
        and float in (type(said), type(wanted))
    ):
        try:
            return math.isclose(said, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        except OverflowError:  # a whole number that no float can be
            return False
    return said == wanted
