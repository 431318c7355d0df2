"""The source's end of a move: a trajectory whose request stands still, or that waits for a tool, is offered
to its destination, which takes it or not.

Given to whoever has such trajectories: batch.py and answers.py. Where a replica waits for the controller it
says its last message again every AGAIN_SECONDS; so a lost message is made up for, and every wait ends.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.moves import Import, Imported, MoveAbort, MoveCommit, MoveReady, Reserved
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.siblings import taken_along

AGAIN_SECONDS = 2.0
FromController = Import | MoveCommit | MoveAbort
M = TypeVar("M", bound=FromController)
# whether the trajectory, which has a move, has gone; else it goes on here
HandOver = Callable[[TrajectoryInFlight], Coroutine[Any, Any, bool]]


class MoveMail:
    """The controller's answers to what this replica says of its moves, by move."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._boxes: dict[str, asyncio.Queue[FromController]] = {}

    def __contains__(self, move_id: str) -> bool:
        return move_id in self._boxes

    def open(self, move_id: str) -> None:
        """From now on the answers of this move are kept, until `close`."""
        self._boxes[move_id] = asyncio.Queue()

    def close(self, move_id: str) -> list[FromController]:
        """Returns those that nobody has taken."""
        box = self._boxes.pop(move_id)
        return [box.get_nowait() for _ in range(box.qsize())]

    def arrived(self, message: FromController) -> None:
        """The destination has opened the move."""
        self._boxes[message.move_id].put_nowait(message)

    async def ask(self, message: MoveReady | Reserved | Imported, *wanted: type[M]) -> M:
        """Sends `message`, again and again, until one of the wanted answers comes."""
        box = self._boxes[message.move_id]
        self._send(message)
        while True:
            try:
                async with asyncio.timeout(AGAIN_SECONDS):  # wait_for of 3.11 may swallow a cancellation
                    answer = await box.get()
            except TimeoutError:
                self._send(message)
                continue
            if isinstance(answer, wanted):
                return answer


class MoveSource:
    """A replica's; migration.py shares its mail."""

    def __init__(self, context: RoleContext, engines: EngineLives) -> None:
        self._trace = context.trace
        self._engines = engines
        self.mail = MoveMail(context.channel.send)

    async def hand_over(self, trajectory: TrajectoryInFlight) -> bool:
        """See HandOver."""
        assert trajectory.move is not None
        order, t0 = trajectory.move.order, time.time()
        await trajectory.move.sent.wait()
        self.mail.open(order.move_id)
        try:
            ready = MoveReady(order.move_id, trajectory.partial, taken_along(trajectory.siblings))
            gone = isinstance(await self.mail.ask(ready, MoveCommit, MoveAbort), MoveCommit)
        finally:
            self.mail.close(order.move_id)
        if order.address:
            engine = self._engines.current
            await (engine.kv_commit(order.move_id) if gone else engine.kv_abort(order.move_id))
        of = {"trajectory_id": trajectory.trajectory_id, "tokens": trajectory.partial.count}
        self._trace.record("move", t0, time.time(), **of, gone=gone)
        return gone
