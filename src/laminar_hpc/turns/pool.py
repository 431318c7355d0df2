"""The environments of a rollout rank, in worker processes as its rewards have them.

    open(row) -> Session: reset
    session.call(tool, arguments) -> what the model reads
    session.reward(), session.close()

    environment.tools    plain: each call has a process to itself; async: calls share an event loop
    environment.factory  plain: each session has a process to itself; async: sessions share an event loop
    environment.agent    as a factory; run(...) is its whole life, and who asked for it bounds it

What the user's tool raises is told to the model. What is nobody's answer (a process that died, a factory's
method that hangs, a reset or get_reward that raises) is EnvironmentFailed: the trajectory cannot be graded.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.fork_server import ForkServer, Worker, WorkerLost
from laminar_hpc.environments.reward_crews import Crew, SharedCrew
from laminar_hpc.environments.reward_protocol import Call, Result, Setup, Spec
from laminar_hpc.turns.tools import error_text

SESSIONS_MAX = 1024  # at once; others wait for one to end
_CALLS_MAX = 256  # processes of plain functions
_FACTORY = "environment"
_RUN = "run"  # an agent's only method
_UNBOUNDED = 1e9  # seconds, for a worker

Ask = Callable[[Call], Coroutine[Any, Any, Result]]
Close = Callable[[], None]


class EnvironmentFailed(Exception):
    """Not by what the model did: nothing can be said of the trajectory."""


class Session:
    """One trajectory's. `observation`: what reset returned."""

    def __init__(self, number: int, ask: Ask, close: Close) -> None:
        self.observation: str | None = None
        self._number, self._ask, self._close = number, ask, close

    async def reset(self, row: dict) -> None:
        """Raises EnvironmentFailed."""
        call = Call(0, _FACTORY, row=row, session=self._number, method="reset")
        self.observation = (await self._sure(call, "reset")).text

    async def call(self, name: str, arguments: dict) -> str:
        """What the model reads. Raises EnvironmentFailed."""
        call = Call(0, _FACTORY, session=self._number, method=name, arguments=arguments)
        return (await self._sure(call, name)).text or ""

    async def reward(self) -> Result:
        """Raises EnvironmentFailed."""
        return await self._sure(Call(0, _FACTORY, session=self._number, method="get_reward"), "get_reward")

    async def run(self, **arguments: str) -> Result:
        """An agent's, to its end. Raises EnvironmentFailed."""
        call = Call(0, _FACTORY, session=self._number, method=_RUN, arguments=arguments)
        return await self._sure(call, "the agent")

    def close(self) -> None:
        """For good; once."""
        self._close()

    async def _sure(self, call: Call, what: str) -> Result:
        try:
            result = await self._ask(call)
        except WorkerLost:
            raise EnvironmentFailed(f"its process ended in {what}") from None
        except TimeoutError:
            raise EnvironmentFailed(f"{what} did not return in time") from None
        if result.error:
            raise EnvironmentFailed(f"{what}: {result.error}")
        return result


class _FunctionSession(Session):
    """Of environment.tools: nothing is kept between two calls. A process that died, or was ended at its time
    limit, had this call alone, so that the model is told."""

    async def reset(self, row: dict) -> None:
        """There is nothing to reset."""

    async def call(self, name: str, arguments: dict) -> str:
        """See Session."""
        try:
            result = await self._ask(Call(0, name, arguments=arguments))
        except WorkerLost:
            return error_text(f"the process of {name} ended")
        return error_text(result.error) if result.error else result.text or ""


class EnvironmentPool:
    """`start`, use, `close`. `tools` and `rewards` (it has get_reward) are known after `start`. `quiet`: what
    the user's code prints is dropped."""

    def __init__(self, config: EnvironmentConfig, quiet: bool = False) -> None:
        self._limit, self._factory = config.timeout_seconds, config.factory or config.agent
        bound = _UNBOUNDED if config.agent else self._limit
        self._server = ForkServer(Setup(_specs(config), bound, ""), quiet)
        self._crew = Crew(self._server, 1, _CALLS_MAX, self._limit)
        self._shared = SharedCrew(self._server, 1, self._limit)
        self._ids = itertools.count(1)
        self._free = asyncio.Semaphore(SESSIONS_MAX)
        self._ending: set[asyncio.Task[None]] = set()
        self.tools: list[dict] = []
        self.rewards = False

    async def start(self) -> None:
        """Raises LaminarError for what cannot be imported, or is no tool or environment."""
        try:
            await self._server.start()
            ready = self._server.ready
            self.tools, self.rewards = ready.tools, ready.rewards
            names = [tool["function"]["name"] for tool in self.tools]
            if double := {name for name in names if names.count(name) > 1}:
                raise LaminarError(f"environment.tools: several are called {min(double)}; rename all but one")
            if ready.asynchronous:
                await self._shared.start()
            if not self._factory and len(ready.asynchronous) < len(names):
                await self._crew.start()
        except BaseException:
            await self.close()
            raise

    async def open(self, row: dict) -> Session:
        """A session whose reset has returned. Raises EnvironmentFailed; LaminarError only when no worker can
        be started any more."""
        await self._free.acquire()
        number, worker = next(self._ids), None
        try:
            if not self._factory:
                return _FunctionSession(number, self._ask_any, self._released)
            alone = not self._server.ready.asynchronous
            worker = await (self._server.fork(False) if alone else self._shared.worker())
            session = Session(number, self._asks(worker, alone), self._closes(worker, number, alone))
            await session.reset(row)
            return session
        except BaseException as error:
            if worker is not None:
                self._closes(worker, number, alone)()
            else:
                self._free.release()
            if isinstance(error, WorkerLost):
                raise EnvironmentFailed("its process ended before reset") from None
            raise

    async def close(self) -> None:
        """Ends all workers, also those with calls in flight."""
        await asyncio.gather(self._crew.stop(), self._shared.stop())
        for task in list(self._ending):
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._server.stop()

    def _released(self) -> None:
        self._free.release()

    async def _ask_any(self, call: Call) -> Result:
        """One function's call, made once."""
        call.id = next(self._ids)
        crew: Crew | SharedCrew = self._crew
        if call.name in self._server.ready.asynchronous:
            crew = self._shared
        return await crew.run(call)

    def _asks(self, worker: Worker, alone: bool) -> Ask:
        """A shared worker bounds its calls itself."""

        async def ask(call: Call) -> Result:
            call.id = next(self._ids)
            return await worker.ask(call, self._limit if alone and call.method != _RUN else None)

        return ask

    def _closes(self, worker: Worker, number: int, alone: bool) -> Close:
        """Nobody waits for the end of a session."""

        async def end() -> None:
            if alone:
                return await self._server.reap(worker)
            with contextlib.suppress(WorkerLost, TimeoutError):  # it is gone, and the session with it
                await worker.ask(Call(next(self._ids), _FACTORY, session=number), self._limit)
            return None

        def close() -> None:
            self._free.release()
            task = asyncio.create_task(end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        return close


def _specs(config: EnvironmentConfig) -> list[Spec]:
    for key, path, style in (("factory", config.factory, "environment"), ("agent", config.agent, "agent")):
        if path:
            return [Spec(_FACTORY, f"environment.{key}='{path}'", path, "", style, "")]
    return [
        Spec(path.rpartition(".")[2], f"environment.tools: {path}", path, "", "tool", "")
        for path in config.tools
    ]
