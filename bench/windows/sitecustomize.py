"""On PYTHONPATH of the roles of bench/kill_windows.py: this rank kills itself in one of its role's windows.

A window is a function of the product, and whether the rank dies when it is called or when it has returned.
Each life of a rank takes the window of its role in which it died least often, and dies there at the first,
second or third call of its turn. KILL_WINDOWS is the folder of the plan and of one file per death.
"""

import functools
import inspect
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

AHEAD = 8  # deaths that a window may have more than another: the roles need not wait for each other
_FOLDER = Path(os.environ.get("KILL_WINDOWS", ""))
_ROLE = next((word[5:] for word in sys.orig_argv if word.startswith("role=")), "")
_IS_RANK = (
    sys.orig_argv[1:] and "laminar_hpc" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv
)


class Fuse:
    """Ends the process at the `calls`-th call at which it is window `name`'s turn."""

    def __init__(self, name: str, calls: int) -> None:
        self.name, self.calls = name, calls

    def burn(self) -> None:
        plan = _plan()
        if plan is None or not _is_turn_of(self.name, plan):
            return
        self.calls -= 1
        if self.calls <= 0:
            (_FOLDER / f"{self.name}.{time.time_ns()}.death").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(self, function: Callable, before: bool) -> Callable:
        """`function`, with this fuse at its call or at its return."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waits(*args: object, **named: object) -> object:
                if before:
                    self.burn()
                result = await function(*args, **named)
                if not before:
                    self.burn()
                return result

            return waits

        @functools.wraps(function)
        def calls(*args: object, **named: object) -> object:
            if before:
                self.burn()
            result = function(*args, **named)
            if not before:
                self.burn()
            return result

        return calls


def _plan() -> dict | None:
    """None when nobody shall die any more."""
    try:
        return json.loads((_FOLDER / "plan.json").read_text())
    except FileNotFoundError:
        return None


def _deaths(plan: dict) -> dict[str, list[float]]:
    """The times of the deaths in each window."""
    times: dict[str, list[float]] = {name: [] for name in plan["windows"]}
    for path in _FOLDER.glob("*.death"):
        times[path.name.split(".")[0]].append(path.stat().st_mtime)
    return times


def _is_turn_of(name: str, plan: dict) -> bool:
    """No window is far ahead of another, none has more deaths than it shall have, and none dies soon after
    another."""
    times = _deaths(plan)
    newest = max((time for each in times.values() for time in each), default=0.0)
    most = min(plan["kills"], min(map(len, times.values())) + AHEAD)
    return len(times[name]) < most and time.time() - newest > plan["between"]


def _arm(plan: dict) -> None:
    times = _deaths(plan)
    mine = [name for name, window in plan["windows"].items() if window["role"] == _ROLE]
    name = min(mine, key=lambda each: (len(times[each]), random.random()))
    window, fuse = plan["windows"][name], Fuse(name, random.randint(1, 3))

    def put_in(module: ModuleType) -> None:
        owner, _, function = window["function"].rpartition(".")
        place = getattr(module, owner) if owner else module
        setattr(place, function, fuse.wrapped(getattr(place, function), window["when"] == "call"))

    after_import(window["module"], put_in)


if _ROLE and _IS_RANK and (_its := _plan()):
    from after_import import after_import

    _arm(_its)
