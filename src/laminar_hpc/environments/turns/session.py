"""What a trajectory has of its environment: its reset, its calls, its reward. Made by pool.py."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from laminar_hpc.environments.turns.tools import error_text
from laminar_hpc.environments.workers.fork_server import WorkerLost
from laminar_hpc.environments.workers.protocol import Call, CallResult

RUN = "run"  # an agent's only method
Ask = Callable[[Call], Coroutine[Any, Any, CallResult]]
Close = Callable[[], None]


class EnvironmentFailed(Exception):
    """Not by what the model did: nothing can be said of the trajectory."""


class EnvironmentHangs(EnvironmentFailed):
    """What it was asked did not return in time."""


class Session:
    """One trajectory's, of the environment called `name`. `observation`: what reset returned."""

    _died = "its process ended in {}"

    def __init__(self, name: str, number: int, ask: Ask, close: Close) -> None:
        self.observation: str | None = None
        self._name = name
        self._number = number
        self._ask = ask
        self._close = close

    async def reset(self, row: dict) -> None:
        """Raises EnvironmentFailed."""
        self.observation = (await self._sure("reset", row=row)).text

    async def call(self, name: str, arguments: dict) -> str:
        """What the model reads. Raises EnvironmentFailed."""
        return (await self._sure(name, arguments=arguments)).text or ""

    async def reward(self) -> CallResult:
        """Raises EnvironmentFailed."""
        return await self._sure("get_reward")

    def close(self) -> None:
        """For good; once."""
        self._close()

    async def _sure(
        self, method: str, row: dict | None = None, arguments: dict | None = None, what: str = ""
    ) -> CallResult:
        """`what`: errors call the method so."""
        call, what = Call(0, self._name, session=self._number, method=method), what or method
        call.row = row or {}
        call.arguments = json.dumps(arguments or {})
        try:
            result = await self._ask(call)
        except WorkerLost:
            raise EnvironmentFailed(self._died.format(what)) from None
        except TimeoutError:
            raise EnvironmentHangs(f"{what} did not return in time") from None
        if result.error:
            raise EnvironmentFailed(f"{what}: {result.error}")
        return result


class AgentSession(Session):
    """A session of an agent: `run` is its whole life."""

    _who = "the agent"

    async def reset(self, row: dict) -> None:
        """Nothing is begun yet."""
        self._row = row

    async def run(self, **arguments: str) -> CallResult:
        """To its end: base_url, api_key, model. Raises EnvironmentFailed."""
        return await self._sure(RUN, self._row, dict(arguments), self._who)


class VerifiersSession(AgentSession):
    """A session of a verifiers environment, whose rows hold its tasks."""

    _died, _who = "verifiers' process ended", "verifiers"

    async def reset(self, row: dict) -> None:
        self._row = row["task"]


class FunctionSession(Session):
    """Of environment.tools: nothing is kept between two calls. A process that died, or was ended at its time
    limit, had this call alone, so that the model is told."""

    async def reset(self, row: dict) -> None:
        """There is nothing to reset."""

    async def call(self, name: str, arguments: dict) -> str:
        try:
            result = await self._ask(Call(0, name, arguments=json.dumps(arguments)))
        except WorkerLost:
            return error_text(f"the process of {name} ended")
        return error_text(result.error) if result.error else result.text or ""
