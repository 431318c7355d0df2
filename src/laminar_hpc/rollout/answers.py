"""What the calls of a turn come to, while their trajectory may move: calls that are made here, and those that
another replica makes, from which their trajectory has moved here meanwhile.

    made_here        calls end -> Answer
                     MoveOrder -> migration.py hands the trajectory over -> the calls go on; Answer to the
                                  controller, which passes it on to whoever has the trajectory
                     the engine fails -> the same, of all that wait
    made_elsewhere   <- Answer, through the controller; may be ordered to move like any other

Owned by episodes.py. Names are never used twice, so an Answer that nobody wants does no harm.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from laminar_hpc.environments.turns.session import EnvironmentFailed
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.machine.own_time import own_time, within
from laminar_hpc.rollout.in_flight import Outcome, State, TrajectoryInFlight
from laminar_hpc.rollout.move_source import HandOver

WAY_SECONDS = 30.0  # of an Answer from another replica, beyond the time of its calls
_REMEMBERED = 4096  # Answers that nobody has asked for yet


class TrajectoryEnded(Exception):
    """The trajectory goes on elsewhere, or cannot go on."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def name_of(replica: int, trajectory_id: int, attempt: int, tokens: int) -> str:
    """Of the calls behind so many tokens of this attempt. The controller reads the replica."""
    return f"{replica}:{trajectory_id}:{attempt}:{tokens}"


class CallAnswers:
    """A replica's."""

    def __init__(self, channel: Channel, hand_over: HandOver) -> None:
        self._channel = channel
        self._hand_over = hand_over
        self._heard: dict[str, asyncio.Future[Answer]] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._may_tell = asyncio.Event()
        self._may_tell.set()

    async def made_here(
        self, trajectory: TrajectoryInFlight, name: str, making: Coroutine[Any, Any, Answer]
    ) -> Answer:
        """What `making` comes to. Raises TrajectoryEnded, and what `making` raises."""
        calls = asyncio.create_task(making)
        try:
            return await self._awaited(trajectory, name, calls, None)
        finally:
            if name not in self._following:
                calls.cancel()

    async def made_elsewhere(self, trajectory: TrajectoryInFlight, seconds: float) -> Answer:
        """What another replica tells of calls within a time. Raises TrajectoryEnded and EnvironmentFailed."""
        name = trajectory.partial.awaits
        try:
            return await self._awaited(trajectory, name, self._told(name), seconds + WAY_SECONDS)
        finally:
            self._heard.pop(name, None)

    def arrived(self, answer: Answer) -> None:
        """It may be here before its trajectory is, or behind it."""
        if not (future := self._told(answer.name)).done():
            future.set_result(answer)
        while len(self._heard) > _REMEMBERED:
            del self._heard[next(iter(self._heard))]

    def _told(self, name: str) -> asyncio.Future[Answer]:
        return self._heard.setdefault(name, asyncio.get_running_loop().create_future())

    @property
    def made_for_others(self) -> bool:
        """Calls are made here for trajectories that go on elsewhere."""
        return bool(self._following)

    def go_on(self) -> None:
        """What a local batch that has failed had in hand is handed over: its Answers may follow."""
        self._may_tell.set()

    async def settled(self) -> None:
        """Returns when no calls are made here for what has moved."""
        while self._following:
            await asyncio.wait(self._following.values())

    async def close(self) -> None:
        """Calls that are still made are given up."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- a trajectory that waits ---------------------------------------------------------------------------

    async def _awaited(
        self, trajectory: TrajectoryInFlight, name: str, answer: asyncio.Future[Answer], seconds: float | None
    ) -> Answer:
        deadline = None if seconds is None else own_time() + seconds
        try:
            with trajectory.waiting():
                while not answer.done():
                    if trajectory.is_dropped():
                        raise TrajectoryEnded(Outcome(moved_away=True))
                    if trajectory.move is not None:
                        await self._leaves(trajectory, name, answer)
                    elif not await self._wakes(trajectory, answer, deadline):
                        text = f"nobody has said within {seconds:g} s what its calls came to"
                        raise TrajectoryEnded(Outcome(lost=text))
        except asyncio.CancelledError:
            if trajectory.state is State.STRANDED and trajectory.is_told:
                self._may_tell.clear()
                self._follow(trajectory, name, answer)
            raise
        if (found := answer.result()).failed_environment:
            raise EnvironmentFailed(found.error)
        if found.error:
            raise TrajectoryEnded(Outcome(lost=found.error))
        return found

    async def _wakes(
        self, trajectory: TrajectoryInFlight, answer: asyncio.Future[Answer], deadline: float | None
    ) -> bool:
        """Waits for the answer, an order or a drop. False when the deadline came first."""
        stirred = asyncio.create_task(trajectory.stirred.wait())
        either: set[asyncio.Future[Any]] = {answer, stirred}
        try:
            async with within(None if deadline is None else deadline - own_time()):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return False
        finally:
            stirred.cancel()
        return True

    async def _leaves(
        self, trajectory: TrajectoryInFlight, name: str, answer: asyncio.Future[Answer]
    ) -> None:
        """Returns when its move is off. Raises TrajectoryEnded when it has gone."""
        before = trajectory.partial.awaits
        trajectory.partial.awaits = name
        if await self._hand_over(trajectory):
            self._follow(trajectory, name, answer)
            raise TrajectoryEnded(Outcome(moved_away=True))
        trajectory.partial.awaits = before
        trajectory.stay()

    def _follow(self, trajectory: TrajectoryInFlight, name: str, answer: asyncio.Future[Answer]) -> None:
        """It goes on elsewhere, and the answer follows; but one that was to come from elsewhere, and has not,
        goes there by itself."""
        trajectory.partial.awaits = name
        if name not in self._heard or answer.done():
            self._following[name] = asyncio.create_task(self._tell(trajectory.trajectory_id, name, answer))

    async def _tell(self, trajectory_id: int, name: str, answer: asyncio.Future[Answer]) -> None:
        try:
            found = await answer
        except EnvironmentFailed as error:
            found = Answer(trajectory_id, name, error=str(error), failed_environment=True)
        except Exception as error:  # no process can be started any more: this replica is about to end
            found = Answer(trajectory_id, name, error=f"{type(error).__name__}: {error}")
        try:
            await self._may_tell.wait()
            self._channel.send(found)
        finally:
            del self._following[name]
