"""What an environment worker has of the user: a function as a tool, a class with tools (TRL's environment
contract), or an agent. Called by environments/workers/process.py, as rewards are.

An environment whose methods are all coroutines, and an async agent, share their process and event loop with
others; any other has a process to itself (environments/turns/pool.py sees to it), so that it may block, and
be ended.
"""

import asyncio
import inspect
import json
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.reward_styles import RewardFault, accepted, checked
from laminar_hpc.environments.turns.tools import PythonTool, as_text, error_text
from laminar_hpc.environments.workers.protocol import MAX_ERROR, Call, CallResult, Spec, sendable

_NOT_TOOLS = ("reset", "get_reward")
_GIVEN = ("row", "base_url", "api_key", "model")  # to an agent
MAX_TEXT = 1 << 20  # characters of what a tool returns; more is cut in the middle


class NoSession(RewardFault):
    """It was never begun here."""

    fault = "session"


class Tool:
    """A function. What it raises, the model reads."""

    rewards = False

    def __init__(self, function: Callable, spec: Spec) -> None:
        self._tool = PythonTool(function, spec.name, spec.label)
        self.is_async = self._tool.is_async
        self.tools = [self._tool.schema]
        self.idempotent = _idempotent({self._tool.name: function})

    def call(self, call: Call) -> object:
        return _called(self._tool, json.loads(call.arguments))

    def result(self, call: Call, value: object, t0: float) -> CallResult:
        return _told(call, value, t0)


class Environment:
    """A class, and its instances by session."""

    def __init__(self, factory: Callable, spec: Spec) -> None:
        self._factory = factory
        self._instances = dict[int, object]()
        label = spec.label
        methods = {
            name: member
            for name, member in inspect.getmembers(factory)
            if (inspect.isfunction(member) or inspect.ismethod(member)) and not name.startswith("_")
        }
        if "reset" not in methods:
            raise LaminarError(f"{label} has no reset(**row): an environment is a class with reset and tools")
        tools = {name: method for name, method in methods.items() if name not in _NOT_TOOLS}
        made = {name: PythonTool(_unbound(factory, name), name, label) for name in tools}
        if not made:
            raise LaminarError(f"{label} has no public method beside reset and get_reward: it has no tools")
        self.tools = [tool.schema for tool in made.values()]
        self.rewards = "get_reward" in methods
        self.idempotent = _idempotent(tools)
        self._parameters = inspect.signature(_unbound(factory, "reset")).parameters
        self.is_async = all(inspect.iscoroutinefunction(method) for method in methods.values())
        self._label = label
        self._runner = asyncio.Runner()

    def call(self, call: Call) -> object:
        """What the method returns, to be awaited if all of them are."""
        value = self._call(call)
        if not self.is_async and inspect.iscoroutine(value):
            return self._runner.run(value)
        return value

    def _call(self, call: Call) -> object:
        if call.method == "":
            return self._instances.pop(call.session, None) and None
        if call.method == "reset":
            instance = self._instances[call.session] = self._factory()
            return instance.reset(**accepted(call.row, self._parameters))
        if (found := self._instances.get(call.session)) is None:
            raise NoSession("its environment is not here")
        method = getattr(found, call.method)
        if call.method == "get_reward":
            return method()
        return _called(PythonTool(method, call.method, self._label), json.loads(call.arguments))

    def result(self, call: Call, value: object, t0: float) -> CallResult:
        """Raises RewardFault for a reward that is none."""
        if call.method == "get_reward":
            number, parts = checked(value, "laminar")
            return CallResult(call.id, number, parts, t0, time.time())
        return _told(call, value, t0)


class Agent:
    """The function run(row, base_url, api_key, model), plain or async. Raises LaminarError for others."""

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

    def result(self, call: Call, value: object, t0: float) -> CallResult:
        """Raises RewardFault for a reward that is none; None is left to reward.function."""
        number, parts = (None, {}) if value is None else checked(value, "laminar")
        return CallResult(call.id, number, parts, t0, time.time())


def _idempotent(tools: Mapping[str, Callable]) -> list[str]:
    """Those that may be called twice for one call of the model: `function.idempotent = True` says so."""
    return [name for name, tool in tools.items() if getattr(tool, "idempotent", False)]


def _unbound(factory: Callable, name: str) -> Callable:
    """A method as the model sees it: without self."""
    method = getattr(factory, name)
    if inspect.ismethod(method) or isinstance(inspect.getattr_static(factory, name), staticmethod):
        return method  # a class or static method has none

    def shown() -> None: ...

    signature = inspect.signature(method)
    shown.__name__ = method.__name__
    shown.__doc__ = inspect.getdoc(method)
    own = signature.replace(parameters=[*signature.parameters.values()][1:])
    shown.__signature__ = own  # type: ignore[attr-defined]
    shown.__annotations__ = {k: v for k, v in inspect.get_annotations(method, eval_str=True).items()}
    return shown


def _called(tool: PythonTool, arguments: dict) -> object:
    """What it returns; in place of what it raises an error for the model."""
    try:
        value = tool(arguments)
    except Exception as error:
        return error_text(tool.reason(error)[:MAX_ERROR])
    return _awaited(tool, value) if inspect.isawaitable(value) else value


async def _awaited(tool: PythonTool, value: Awaitable[object]) -> object:
    try:
        return await value
    except Exception as error:
        return error_text(tool.reason(error)[:MAX_ERROR])


def _told(call: Call, value: object, t0: float) -> CallResult:
    if call.method == "reset" and isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value = value[0]  # Gymnasium's (observation, info)
    text = None if value is None and call.method == "reset" else sendable(_cut(as_text(value)))
    return CallResult(call.id, None, {}, t0, time.time(), text=text)


def _cut(text: str) -> str:
    half = MAX_TEXT // 2
    left_out = len(text) - MAX_TEXT
    return text if left_out <= 0 else f"{text[:half]}\n... {left_out} characters ...\n{text[-half:]}"
