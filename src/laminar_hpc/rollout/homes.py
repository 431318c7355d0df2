"""Environments that were made at this replica and stay here, whoever has their trajectories.

    reset -> begin -> its trajectory is here: called and graded without any message
                   -> that has moved: Ask -> its calls, made once -> Answer, to whoever has it by then
                   -> that has come back: `back`
    graded here or for another one (ScoreOrder), failed, or LetGo -> closed

Owned by episodes.py. An environment here holds none of the replica's weights: it may load others, and be
granted work. What nobody asks for any more, and nobody has let go, is closed after `seconds`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from laminar_hpc.environments.turns.episode import Episode
from laminar_hpc.environments.turns.session import EnvironmentFailed, Session
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.messages.homes import Ask, LetGo
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.rollout.in_flight import TrajectoryInFlight

logger = logging.getLogger(__name__)


@dataclass
class Home:
    """One environment. `trajectory`: its own while that is here, `left`: when it went (monotonic). `episode`
    knows since when the environment is there, and how long it has worked; `answers`: by name, None while the
    calls are made."""

    session: Session
    episode: Episode
    row: dict
    trajectory: TrajectoryInFlight | None
    left: float = 0.0
    answers: dict[str, Answer | None] = field(default_factory=dict)


Make = Callable[[Home, Ask], Coroutine[Any, Any, Answer]]  # raises EnvironmentFailed


class EnvironmentHomes:
    """A replica's. `make` makes calls for a trajectory that is elsewhere."""

    def __init__(self, replica: int, channel: Channel, make: Make, seconds: float) -> None:
        self._replica = replica
        self._channel = channel
        self._make = make
        self._seconds = seconds
        self._homes: dict[str, Home] = {}
        self._numbers = itertools.count()
        self._making: set[asyncio.Task[None]] = set()

    # ---- its trajectory is here ----------------------------------------------------------------------------

    def begin(self, trajectory: TrajectoryInFlight) -> None:
        """The trajectory's environment has been reset."""
        assert trajectory.session is not None and trajectory.episode is not None
        name = f"{self._replica}:{trajectory.trajectory_id}:{trajectory.attempt}:{next(self._numbers)}"
        self._homes[name] = Home(trajectory.session, trajectory.episode, trajectory.group.row, trajectory)
        trajectory.partial.home = name

    def back(self, trajectory: TrajectoryInFlight) -> bool:
        """It has come to where its environment is; False where that is not here."""
        if (home := self._homes.get(trajectory.partial.home)) is None or trajectory.episode is None:
            return False
        trajectory.session = home.session
        home.trajectory = trajectory
        trajectory.episode.opened = home.episode.opened
        trajectory.episode.worked_seconds = home.episode.worked_seconds
        home.episode = trajectory.episode
        return True

    def calls(self, trajectory: TrajectoryInFlight, name: str, answer: Answer | None = None) -> None:
        """They are made for a trajectory that is here, or have come to `answer`; it may have left since."""
        if home := self._homes.get(trajectory.partial.home):
            home.answers[name] = answer
            if answer is not None and home.trajectory is not trajectory:
                home.episode.worked_seconds += answer.seconds

    def leaves(self, trajectory: TrajectoryInFlight) -> None:
        """It goes on elsewhere; it may be back already."""
        trajectory.session = None
        home = self._homes.get(trajectory.partial.home)
        if home is not None and home.trajectory is trajectory:
            home.trajectory = None
            home.left = time.monotonic()
        self._close_old()

    def failed(self, trajectory: TrajectoryInFlight) -> None:
        """The trajectory's environment failed. If it has moved away, it is closed here: nobody else will."""
        home = self._homes.get(trajectory.partial.home)
        if home is not None and home.trajectory is None and self.take(trajectory.partial.home):
            home.session.close()

    def take(self, name: str) -> Home | None:
        """To be graded and closed by the caller."""
        return self._homes.pop(name, None)

    # ---- its trajectory is elsewhere -----------------------------------------------------------------------

    @property
    def for_others(self) -> bool:
        """Environments are here whose trajectories are not."""
        return any(home.trajectory is None for home in self._homes.values())

    def arrived(self, message: Ask | LetGo) -> None:
        """In the order of arrival."""
        if isinstance(message, Ask):
            self._asked(message)
        elif home := self.take(message.home):
            home.session.close()

    def _asked(self, ask: Ask) -> None:
        if (home := self._homes.get(ask.home)) is None:
            error = f"its environment is not at replica {self._replica} any more"
            self._channel.send(Answer(ask.trajectory_id, ask.name, error=error))
        elif ask.name not in home.answers:
            home.answers[ask.name] = None
            task = asyncio.create_task(self._answer(home, ask))
            self._making.add(task)
            task.add_done_callback(self._making.discard)
        elif answer := home.answers[ask.name]:  # it may have got lost with a controller
            self._channel.send(answer)

    async def _answer(self, home: Home, ask: Ask) -> None:
        try:
            answer = home.answers[ask.name] = await self._make(home, ask)
        except EnvironmentFailed as error:
            answer = Answer(ask.trajectory_id, ask.name, error=str(error), failed_environment=True)
            if self.take(ask.home):
                home.session.close()
        self._channel.send(answer)

    def _close_old(self) -> None:
        """Only a controller that took over while their trajectories ended has let them be forgotten."""
        until = time.monotonic() - self._seconds
        old = [name for name, home in self._homes.items() if home.trajectory is None and home.left < until]
        for name in old:
            logger.warning("the environment %s was let go by nobody for %g s", name, self._seconds)
            self._homes.pop(name).session.close()

    async def close(self) -> None:
        """Calls that are still made are given up; the pool ends their environments."""
        for task in list(self._making):
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
