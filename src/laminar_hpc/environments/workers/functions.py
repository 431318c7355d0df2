"""What a worker calls: the user's functions, imported, and the answers that they come to. Called by
process.py; under another interpreter too (interpreter.py)."""

import importlib
import inspect
import time
from collections.abc import Callable
from typing import Protocol

from laminar_hpc.config.user_code import load_function
from laminar_hpc.environments.reward_styles import RewardFault, adapted, checked
from laminar_hpc.environments.workers import protocol
from laminar_hpc.environments.workers.framing import framed

# What is no reward, by style: the class of environments/turns/served.py that serves it.
OTHERS = {"tool": "Tool", "environment": "Environment", "agent": "Agent"}


class Reward:
    """One reward, ready to be called. Raises LaminarError when it cannot be."""

    def __init__(self, spec: protocol.Spec, timeout_seconds: float, prompt_field: str) -> None:
        self.style = spec.style
        if spec.url:
            from laminar_hpc.environments.http_reward import HttpReward  # aiohttp takes a third of a second

            self.is_async = True
            self.style = "laminar"
            self.call: Callable[[protocol.Call], object] = HttpReward(spec, timeout_seconds)
            return
        function = load_function(spec.function, spec.label)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        self.call = adapted(function, spec.style, spec.label, prompt_field)
        if hasattr(function, "prepare"):  # an object that wants to do something once, before the forks
            function.prepare()

    def result(self, call: protocol.Call, value: object, t0: float) -> protocol.CallResult:
        """Makes the result of what the call returned. Raises RewardFault."""
        number, parts = checked(value, self.style)
        return protocol.CallResult(call.id, number, parts, t0, time.time())


class Served(Protocol):
    """What a worker calls: a Reward, or one of OTHERS."""

    is_async: bool

    def call(self, call: protocol.Call, /) -> object:
        """What the user's code returns, or an awaitable of it."""

    def result(self, call: protocol.Call, value: object, t0: float) -> protocol.CallResult:
        """Makes the result of what the call returned. Raises RewardFault."""


def load_all(setup: protocol.WorkerSetup) -> dict[str, Served]:
    """Imports the user's functions, by name of reward or tool; what their modules raise is raised here."""

    def load(spec: protocol.Spec) -> Served:
        if spec.style not in OTHERS:
            return Reward(spec, setup.timeout_seconds, setup.prompt_field)
        kind = getattr(importlib.import_module("laminar_hpc.environments.turns.served"), OTHERS[spec.style])
        served: Served = kind(load_function(spec.function, spec.label), spec)
        return served

    return {spec.name: load(spec) for spec in setup.specs}


def ready(served: dict[str, Served]) -> protocol.Ready:
    """The report that all is imported, which of it is awaited, and which tools there are."""
    awaited = [name for name, each in served.items() if each.is_async]
    tools = {name: list(getattr(each, "tools", ())) for name, each in served.items()}
    rewards = [name for name, each in served.items() if getattr(each, "rewards", False)]
    idempotent = {name: list(getattr(each, "idempotent", ())) for name, each in served.items()}
    return protocol.Ready("", awaited, tools, rewards, idempotent)


def result(call: protocol.Call, t0: float, error: BaseException) -> protocol.CallResult:
    """Makes the result of a call that raised."""
    fault = error.fault if isinstance(error, RewardFault) else "raised"
    text = protocol.sendable(str(error)) if isinstance(error, RewardFault) else protocol.error_words(error)
    text = " ".join(text[: 2 * protocol.MAX_ERROR].split())[: protocol.MAX_ERROR]
    return protocol.CallResult(call.id, 0.0, {}, t0, time.time(), text, fault)


def answered(call: protocol.Call, answer: protocol.CallResult) -> bytes:
    """The frame that ends the call, whatever the user's code has put into the answer."""
    try:
        return framed(answer)
    except Exception as error:
        return framed(result(call, answer.t0, error))
