"""Episodes of verifiers for rollout/agents.py, as turns/pool.py has those of a user's agent.

    open(row) -> Session: nothing is begun yet
    session.run(base_url, api_key, model) -> the reward of verifiers' trace

Tokens and log-probs are those of the gateway: nothing of a trace but its reward is used. What fails in the
environment is EnvironmentFailed; a process that has died is started anew for the next episode.
"""

import asyncio
import time

from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.reward_styles import NotAReward, checked
from laminar_hpc.environments.workers.protocol import Result
from laminar_hpc.turns.session import EnvironmentFailed, Session
from laminar_hpc.verifiers.process import Lost, Process


class Episode(Session):
    """One trajectory's."""

    def __init__(self, process: Process, task: dict) -> None:
        self.observation, self._process, self._task = None, process, task

    async def run(self, **arguments: str) -> Result:
        """See Session: base_url, api_key, model."""
        t0 = time.time()
        try:
            answer = await self._process.ask(task=self._task, **arguments)
        except Lost:
            raise EnvironmentFailed("verifiers' process ended") from None
        if answer.error:
            raise EnvironmentFailed(f"verifiers: {answer.error}")
        try:
            reward, _ = checked(answer.reward, "laminar")
        except NotAReward as error:
            raise EnvironmentFailed(f"verifiers: {error}") from None
        return Result(0, reward, answer.parts, t0, time.time())

    def close(self) -> None:
        """Who no longer waits for `run` has ended it."""


class VerifiersPool:
    """`start`, use, `close`, as EnvironmentPool."""

    def __init__(self, config: EnvironmentConfig, quiet: bool = False) -> None:
        self._config, self._quiet = config, quiet
        self._process = Process(config, quiet=quiet)
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Raises LaminarError for an interpreter or a taskset that cannot be used."""
        await self._process.start()

    async def open(self, row: dict) -> Episode:
        """Of a row with a task. Raises LaminarError when no process can be started any more."""
        async with self._starting:
            if not self._process.lives:
                await self._process.stop()
                self._process = Process(self._config, quiet=self._quiet)
                await self._process.start()
        return Episode(self._process, row["task"])

    async def close(self) -> None:
        """Ends all episodes."""
        await self._process.stop()
