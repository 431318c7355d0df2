"""The environments of a rollout rank, in worker processes as its rewards have them.

    open(row) -> Session: reset
    session.call(tool, arguments) -> what the model reads
    session.reward(), session.close()

    environment.tools    plain: each call has a process to itself; async: calls share an event loop
    environment.factory  plain: each session has a process to itself; async: sessions share an event loop
                         several: each session is of the one that its row names
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
from laminar_hpc.environments.interpreter import OURS, Interpreter
from laminar_hpc.environments.reward_crews import Crew, SharedCrew
from laminar_hpc.environments.reward_protocol import Call, Result, Setup, Spec
from laminar_hpc.turns.tools import error_text

SESSIONS_MAX = 1024  # at once; others wait for one to end
_CALLS_MAX = 256  # processes of plain functions
_RUN = "run"  # an agent's only method
_UNBOUNDED = 1e9  # seconds, for a worker

Ask = Callable[[Call], Coroutine[Any, Any, Result]]
Close = Callable[[], None]


class EnvironmentFailed(Exception):
    """Not by what the model did: nothing can be said of the trajectory."""


class Session:
    """One trajectory's, of the environment called `name`. `observation`: what reset returned."""

    def __init__(self, name: str, number: int, ask: Ask, close: Close) -> None:
        self.observation: str | None = None
        self._name, self._number, self._ask, self._close = name, number, ask, close

    async def reset(self, row: dict) -> None:
        """Raises EnvironmentFailed."""
        self.observation = (await self._sure("reset", row=row)).text

    async def call(self, name: str, arguments: dict) -> str:
        """What the model reads. Raises EnvironmentFailed."""
        return (await self._sure(name, arguments=arguments)).text or ""

    async def reward(self) -> Result:
        """Raises EnvironmentFailed."""
        return await self._sure("get_reward")

    async def run(self, **arguments: str) -> Result:
        """An agent's, to its end. Raises EnvironmentFailed."""
        return await self._sure(_RUN, arguments=dict(arguments), what="the agent")

    def close(self) -> None:
        """For good; once."""
        self._close()

    async def _sure(
        self, method: str, row: dict | None = None, arguments: dict | None = None, what: str = ""
    ) -> Result:
        """`what`: errors call the method so."""
        call, what = Call(0, self._name, session=self._number, method=method), what or method
        call.row, call.arguments = row or {}, arguments or {}
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
    """`start`, use, `close`. Known after `start`: `tools`, by name of the environment, and `rewards`, the
    names of those that have get_reward. `quiet`: what the user's code prints is dropped."""

    def __init__(self, config: EnvironmentConfig, quiet: bool = False) -> None:
        self._config, self._limit = config, config.timeout_seconds
        self._functions = not (config.factory or config.agent)
        bound = _UNBOUNDED if config.agent else self._limit
        python = Interpreter("environment.python", config.python) if config.python else OURS
        self._server = ForkServer(Setup(_specs(config), bound, ""), quiet, python)
        self._crew = Crew(self._server, 1, _CALLS_MAX, self._limit)
        self._shared = SharedCrew(self._server, 1, self._limit)
        self._ids = itertools.count(1)
        self._free = asyncio.Semaphore(SESSIONS_MAX)
        self._ending: set[asyncio.Task[None]] = set()
        self.tools: dict[str, list[dict]] = {}
        self.rewards: list[str] = []

    async def start(self) -> None:
        """Raises LaminarError for what cannot be imported, or is no tool or environment."""
        try:
            await self._server.start()
            ready = self._server.ready
            self.tools, self.rewards = ready.tools, ready.rewards
            if ready.asynchronous:
                await self._shared.start()
            if self._functions:
                self.tools = {"": [tool for tools in ready.tools.values() for tool in tools]}
                if len(ready.asynchronous) < len(ready.tools):
                    await self._crew.start()
        except BaseException:
            await self.close()
            raise

    async def open(self, row: dict) -> Session:
        """A session whose reset has returned. Raises EnvironmentFailed; LaminarError only when no worker can
        be started any more."""
        await self._free.acquire()
        name, number, close = environment_of(self._config, row), next(self._ids), None
        try:
            if self._functions:
                return _FunctionSession(name, number, self._ask_any, self._released)
            alone = name not in self._server.ready.asynchronous
            worker = await (self._server.fork(False) if alone else self._shared.worker())
            close = self._closes(worker, name, number, alone)
            session = Session(name, number, self._asks(worker, alone), close)
            await session.reset(row)
            return session
        except BaseException as error:
            if close is not None:
                close()
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
            unbounded = self._config.agent and call.method == _RUN
            return await worker.ask(call, self._limit if alone and not unbounded else None)

        return ask

    def _closes(self, worker: Worker, name: str, number: int, alone: bool) -> Close:
        """Nobody waits for the end of a session."""

        async def end() -> None:
            if alone:
                return await self._server.reap(worker)
            with contextlib.suppress(WorkerLost, TimeoutError):  # it is gone, and the session with it
                await worker.ask(Call(next(self._ids), name, session=number), self._limit)
            return None

        def close() -> None:
            self._free.release()
            task = asyncio.create_task(end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        return close


def environment_of(config: EnvironmentConfig, row: dict, where: str = "a row") -> str:
    """The name of a row's environment; "" where there are not several. Raises LaminarError for a row, found
    at `where`, that names none."""
    names = config.factories
    if "" in names or not names:
        return ""
    if (name := row.get("environment")) not in names:
        said = f"is {name!r:.60}" if "environment" in row else "is not there"
        raise LaminarError(
            f"{where}: its field 'environment' {said}, and environment.factory has {', '.join(names)}; "
            "name one of them in the row"
        )
    return str(name)


def _specs(config: EnvironmentConfig) -> list[Spec]:
    if config.agent:
        return [Spec("", f"environment.agent='{config.agent}'", config.agent, "", "agent", "")]
    if not config.factory:
        names = [path.rpartition(".")[2] for path in config.tools]
        if double := {name for name in names if names.count(name) > 1}:
            raise LaminarError(f"environment.tools: several are called {min(double)}; rename all but one")
        labels = [f"environment.tools: {path}" for path in config.tools]
        return [Spec(*each, "", "tool", "") for each in zip(names, labels, config.tools, strict=True)]
    keys = {name: f"environment.factory{name and f'.{name}'}" for name in config.factories}
    return [
        Spec(name, f"{keys[name]}='{path}'", path, "", "environment", "")
        for name, path in config.factories.items()
    ]
