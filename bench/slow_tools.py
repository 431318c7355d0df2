"""Environments of bench/environments.py and environment_faults.py: a tool of log-normal latency, and the same
as an environment with a state; with BENCH_FAULTS some of either fail or hang.

In their worker processes, by the names `slow_tools.look` and so on. Seconds are emulated: BENCH_TIME_SCALE of
them pass in one. What is noted goes into the folder BENCH_NOTES.
"""

import asyncio
import math
import os
import random
import time

MEDIAN, P99, LONGEST = 2.0, 60.0, 120.0  # seconds of a call; those that draw more take LONGEST
SIGMA = math.log(P99 / MEDIAN) / 2.3263
FAILING, HANGING = 0.10, 0.01
CALLS = 4  # of a trajectory
DYING = 0.3  # of those that are asked for their reward
_SCALE = float(os.environ.get("BENCH_TIME_SCALE", "1"))
_FAULTS = bool(os.environ.get("BENCH_FAULTS"))
_FOR_EVER = 1e6


def latency() -> float:
    """Of one call, in real seconds."""
    return min(LONGEST, random.lognormvariate(math.log(MEDIAN), SIGMA)) / _SCALE


def fate() -> str:
    """What becomes of it: fails, hangs, or "" for neither."""
    drawn = random.random() if _FAULTS else 1.0
    return "fails" if drawn < FAILING else "hangs" if drawn < FAILING + HANGING else ""


async def look(key: str) -> str:
    """Looks it up."""
    match fate():
        case "fails":
            raise RuntimeError("it is not there")
        case "hangs":
            await asyncio.sleep(_FOR_EVER)
    await asyncio.sleep(latency())
    return "v" + key


class Shelf:
    """Has a process to itself. One that fails ends its process, at its reset, in a call or at its reward."""

    def reset(self, **row: object) -> None:
        """See docs/environments.md."""
        self._left, self._fate = random.randrange(CALLS + 2), fate()
        self._step()

    def look(self, key: str) -> str:
        """Looks it up."""
        self._step()
        time.sleep(latency())
        return "v" + key

    def get_reward(self) -> float:
        """By chance, so that groups are not all alike."""
        self._step()
        return float(random.random() < 0.5)

    def _step(self) -> None:
        if self._fate and self._left == 0:
            if self._fate == "fails":
                os._exit(1)
            time.sleep(_FOR_EVER)
        self._left -= 1


async def told(key: str) -> str:
    """Looks it up. Says something else each time."""
    said = _new("begun")
    await asyncio.sleep(latency())
    return said


class Graded:
    """An environment that often dies when it is asked for its reward."""

    def reset(self, **row: object) -> None:
        """See docs/environments.md."""

    def look(self, key: str) -> str:
        """Looks it up."""
        time.sleep(latency())
        return "v" + key

    def get_reward(self) -> dict:
        """With the number of the grade, which no other has."""
        if random.random() < DYING:
            _new("died")
            os._exit(1)
        return {"reward": float(random.random() < 0.5), "accuracy": 0.0, "grade": float(_new("graded"))}


def _new(what: str) -> str:
    """A number that nobody else has, noted as such: as large as a reward may be."""
    number = str(random.uniform(0.0, 1e6)) if what == "graded" else str(random.getrandbits(48))
    with open(os.path.join(os.environ["BENCH_NOTES"], what), "a") as file:
        file.write(number + "\n")
    return number


def reward(*, prompt: str, response: str, row: dict) -> float:
    """By chance, so that groups are not all alike."""
    return float(random.random() < 0.5)
