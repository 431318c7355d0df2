"""How long a call of the sandbox takes, beside a cold interpreter that imports the same.

    python bench/sandbox.py [--json FILE] [--isolation auto|namespaces|landlock|rlimits] [--calls N]

A call prints a number that sympy and numpy have made, both of which are loaded. `call_p50_ms` and
`call_p90_ms` are from the call to its result, one after the other; `over_cold_start` is what `python -c`
takes for the same program (its median) over `call_p50_ms`;
`calls_per_second` is with two calls in flight for each core. Limits, on a quiet machine: 15 and 30 ms; 80.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time

import common

from laminar_hpc.environments.isolation import tiers
from laminar_hpc.environments.sandbox import Sandbox

PROGRAM = "import numpy, sympy\nprint(sympy.Integer(6) * int(numpy.int64(7)))"
ANSWER = "42\n"
COLD_STARTS = 7
FIRST_CALLS = 5  # not counted


def cold_seconds() -> float:
    """A new interpreter that imports numpy and sympy, the median of some."""
    seconds = []
    for _ in range(COLD_STARTS + 1):  # the first one fills the page cache
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - begun)
        assert done.stdout == ANSWER
    return statistics.median(seconds[1:])


def call_seconds(sandbox: Sandbox, calls: int) -> list[float]:
    """Each call's time, in order of length."""
    seconds = []
    for _ in range(calls + FIRST_CALLS):
        begun = time.perf_counter()
        result = sandbox.run_sync(PROGRAM)
        seconds.append(time.perf_counter() - begun)
        assert result.stdout == ANSWER, result
    return sorted(seconds[FIRST_CALLS:])


async def calls_per_second(sandbox: Sandbox, calls: int) -> float:
    """Several in flight."""
    places = asyncio.Semaphore(2 * len(os.sched_getaffinity(0)))

    async def one() -> None:
        async with places:
            assert (await sandbox.run(PROGRAM)).stdout == ANSWER

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(calls)))
    return calls / (time.perf_counter() - begun)


def main() -> None:
    """Measures and prints one row."""
    options = common.options_of(__doc__ or "")
    options.add_argument("--isolation", default="auto", choices=tiers.ISOLATION)
    options.add_argument("--calls", type=int, default=200, help="calls that are measured (default 200)")
    chosen = options.parse_args()
    cold = cold_seconds()
    with Sandbox(chosen.isolation) as sandbox:
        seconds = call_seconds(sandbox, chosen.calls)
        rate = asyncio.run(calls_per_second(sandbox, chosen.calls))
    p50, p90 = (1000 * seconds[int(share * len(seconds))] for share in (0.5, 0.9))
    figures = {
        "call_p50_ms": p50,
        "call_p90_ms": p90,
        "cold_start_ms": 1000 * cold,
        "over_cold_start": 1000 * cold / p50,
        "calls_per_second": rate,
    }
    tier = tiers.best() if chosen.isolation == "auto" else chosen.isolation
    row = {"isolation": tier, **figures}
    common.finish(chosen, figures, [row], list(row))


if __name__ == "__main__":
    main()
