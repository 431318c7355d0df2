"""The environments of a rollout rank, in worker processes as its rewards have them.

    expect(rows)         resets begin
    open(row) -> Session: reset
    session.call(tool, arguments) -> what the model reads
    session.reward(), session.close()

    environment.tools    plain: each call has a process to itself; async: calls share an event loop
    environment.factory  plain: each session has a process to itself; async: sessions share an event loop
                         several: each session is of the one that its row names
    environment.agent    as a factory; run(...) is its whole life, and who asked for it bounds it

What the user's tool raises is told to the model. What is nobody's answer (a process that died, a factory's
method that hangs, a reset or get_reward that raises) is EnvironmentFailed: the trajectory cannot be graded.
When a method hangs is learned from its calls (policies/deadlines.py). A reset that is late is begun in a
second environment, and a tool that calls itself idempotent is called a second time: the first to return
counts.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.turns.ahead import Ahead
from laminar_hpc.environments.turns.redundant import first_of
from laminar_hpc.environments.turns.session import (
    RUN,
    AgentSession,
    Ask,
    Close,
    EnvironmentFailed,
    FunctionSession,
    Session,
    VerifiersSession,
)
from laminar_hpc.environments.verifiers.process import bridge
from laminar_hpc.environments.workers import crews
from laminar_hpc.environments.workers.crews import WorkerPool
from laminar_hpc.environments.workers.fork_server import ForkServer, Worker, WorkerLost
from laminar_hpc.environments.workers.interpreter import OURS, Interpreter
from laminar_hpc.environments.workers.protocol import Call, CallResult, Spec, WorkerSetup
from laminar_hpc.machine.own_time import own_time
from laminar_hpc.policies.deadlines import Deadline

SESSIONS_MAX = 1024  # at once; others wait for one to end
_CALLS_MAX = 256  # processes of plain functions
_UNBOUNDED = 1e9  # seconds, for a worker


class EnvironmentPool(WorkerPool):
    """`start`, use, `close`. Known after `start`: `tools`, by name of the environment, and `rewards`, the
    names of those that have get_reward. `quiet`: what the user's code prints is dropped."""

    def __init__(self, config: EnvironmentConfig, quiet: bool = False) -> None:
        self._config = config
        self._limit = config.timeout_seconds
        agents = VerifiersSession if config.verifiers else AgentSession
        self._session = agents if config.by_url else Session
        self._has_calls = not (config.factory or config.by_url)  # of functions
        bound = _UNBOUNDED if config.agent else self._limit
        python = Interpreter("environment.python", config.python) if config.python else OURS
        server = (
            bridge(config, quiet=quiet)
            if config.verifiers
            else ForkServer(WorkerSetup(_specs(config), bound), quiet, python)
        )
        super().__init__(server, 1, _CALLS_MAX, self._limit)
        self._free = asyncio.Semaphore(SESSIONS_MAX)
        self._ending: set[asyncio.Task[None]] = set()
        self._deadlines: dict[tuple[str, str], Deadline] = {}
        self._ahead = Ahead(self._begun, SESSIONS_MAX // 2)
        self.tools: dict[str, list[dict]] = {}
        self.rewards: list[str] = []

    async def start(self) -> None:
        """Raises LaminarError for what cannot be imported, or is no tool or environment."""
        await super().start()
        self.tools = self._server.ready.tools
        self.rewards = self._server.ready.rewards
        if self._has_calls:
            self.tools = {"": [tool for tools in self.tools.values() for tool in tools]}

    def deadline(self, name: str, method: str) -> Deadline:
        return self._deadlines.setdefault((name, method), Deadline(self._limit))

    async def open(self, row: dict, patient: bool = False) -> Session:
        """A session whose reset has returned. `patient`: each call has all of timeout_seconds, however long
        others took. Raises EnvironmentFailed; LaminarError only when no worker can be started any more."""
        if self._has_calls:
            await self._free.acquire()
            return FunctionSession("", next(self._ids), self._ask_any, self._free.release)
        if not patient and (session := await self._ahead.take(row)) is not None:
            return session
        return await self._begun(row, patient)

    def expect(self, rows: Sequence[tuple[dict, int]]) -> None:
        """Rows that will be asked for soon, so many times each: their resets begin now. Of what was expected
        before, what is not among them is closed."""
        self._ahead.expect(rows)

    async def _begun(self, row: dict, patient: bool = False) -> Session:
        late = self.deadline(environment_of(self._config, row), "reset").late
        return await first_of(lambda: self._opened(row, patient), late, Session.close)

    async def _opened(self, row: dict, patient: bool) -> Session:
        await self._free.acquire()
        name, number, close = environment_of(self._config, row), next(self._ids), None
        try:
            alone = name not in self._server.ready.asynchronous
            worker = await (self._server.fork(False) if alone else self._shared.worker())
            close = self._closes(worker, name, number, alone)
            session = self._session(name, number, self._asks(worker, alone, patient), close)
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
        await self._ahead.close()
        for task in list(self._ending):
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await super().close()

    async def _ask_any(self, call: Call) -> CallResult:
        """One function's call, made once, unless it says that it may be made twice."""
        crew, deadline = self._crew_of(call), self.deadline(call.name, "")

        async def once() -> CallResult:
            t0 = own_time()
            result = await crew.run(msgspec.structs.replace(call, id=next(self._ids)))
            deadline.took(own_time() - t0)
            return result

        if not self._server.ready.idempotent[call.name]:
            return await once()
        try:
            return await first_of(once, deadline.late, _nothing)
        except WorkerLost:
            return await once()

    def _asks(self, worker: Worker, alone: bool, patient: bool) -> Ask:
        """A shared worker ends its calls itself, after timeout_seconds, and can have a call twice."""
        ready = self._server.ready

        async def ask(call: Call) -> CallResult:
            if call.method == RUN and self._config.by_url:
                return await worker.ask(msgspec.structs.replace(call, id=next(self._ids)))
            deadline = self.deadline(call.name, call.method)
            limit = deadline.limit(patient or call.method == "get_reward")

            async def once() -> CallResult:
                t0, ours = own_time(), msgspec.structs.replace(call, id=next(self._ids))
                try:
                    by_us = alone or limit < self._limit
                    result = await worker.ask(ours, limit if by_us else limit + crews.WORD_SECONDS)
                except TimeoutError:
                    deadline.given_up(limit)
                    raise
                deadline.took(own_time() - t0)
                return result

            twice = not alone and call.method in ready.idempotent[call.name]
            return await first_of(once, deadline.late if twice else None, _nothing)

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


def _nothing(_: CallResult) -> None:
    """Of an answer that came second nothing is to be undone."""


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
        return [Spec("", f"environment.agent='{config.agent}'", config.agent, style="agent")]
    if not config.factory:
        names = [path.rpartition(".")[2] for path in config.tools]
        if double := {name for name in names if names.count(name) > 1}:
            raise LaminarError(f"environment.tools: several are called {min(double)}; rename all but one")
        labels = [f"environment.tools: {path}" for path in config.tools]
        return [Spec(*each, style="tool") for each in zip(names, labels, config.tools, strict=True)]
    keys = {name: f"environment.factory{name and f'.{name}'}" for name in config.factories}
    return [
        Spec(name, f"{keys[name]}='{path}'", path, style="environment")
        for name, path in config.factories.items()
    ]
