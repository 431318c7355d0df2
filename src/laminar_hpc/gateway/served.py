"""What an environment worker has of the user's agent: run(row, base_url, api_key, model), plain or async.
Called by environments/workers/process.py.

Async ones share a process and its event loop; a plain one has a process to itself, so that it can be ended.
"""

import asyncio
import inspect
import json
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.reward_styles import checked
from laminar_hpc.environments.workers.protocol import Call, Result, Spec

_GIVEN = ("row", "base_url", "api_key", "model")


class Agent:
    """The function. Raises LaminarError for one with other parameters."""

    tools: tuple[dict, ...] = ()
    rewards = True

    def __init__(self, function: Callable, spec: Spec) -> None:
        try:
            inspect.signature(function).bind(**dict.fromkeys(_GIVEN))
        except (TypeError, ValueError) as error:
            raise LaminarError(f"{spec.label}: it is called as run({'=, '.join(_GIVEN)}=): {error}") from None
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._function = function
        self._tasks = dict[int, asyncio.Task]()
        for name in ("no_proxy", "NO_PROXY"):  # clients would take a proxy to loopback, too
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))

    def call(self, call: Call) -> object:
        """run is the agent's whole life, "" ends it."""
        if call.method == "":
            if task := self._tasks.pop(call.session, None):
                task.cancel()
            return None
        value = self._function(row=call.row, **json.loads(call.arguments))
        return self._noted(call.session, value) if self.is_async else value

    async def _noted(self, session: int, running: Coroutine[Any, Any, object]) -> object:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[session] = task
        try:
            return await running
        finally:
            if self._tasks.get(session) is task:
                del self._tasks[session]

    def result(self, call: Call, value: object, t0: float) -> Result:
        """Raises RewardFault for a reward that is none; None is left to reward.function."""
        number, parts = (None, {}) if value is None else checked(value, "laminar")
        return Result(call.id, number, parts, t0, time.time())
