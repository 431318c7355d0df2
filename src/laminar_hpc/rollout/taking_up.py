"""The KV cache that a relay keeps of a trajectory that goes on here (line/messages/parking.py): it comes into
this replica's engine before the trajectory's first request.

    reserve, as soon as there is room -> TakeUp ... TakenUp -> import -> the request, and then commit

Whatever fails, the trajectory is prefilled from its tokens, and the relay forgets the cache.
"""

import asyncio
import logging
import time

import msgspec

from laminar_hpc.engine.interface import RequestFailed
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.parking import TakenUp, TakeUp, parked_at
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.partial_response import tokens_of

logger = logging.getLogger(__name__)
TAKE_UP_SECONDS = 40.0  # for the relay to send it; longer than one of its waits for this engine
ROOM_SECONDS = 120.0  # for others' requests to end
LOOK_SECONDS = 0.5  # between two looks for room


class TakingUp:
    """A replica's."""

    def __init__(self, context: RoleContext, engines: EngineLives) -> None:
        self._context = context
        self._engines = engines
        self._awaited: dict[str, asyncio.Future[int]] = {}

    def arrived(self, message: TakenUp) -> None:
        if (future := self._awaited.get(message.parked)) is not None and not future.done():
            future.set_result(message.tokens)

    async def take_up(self, trajectory: TrajectoryInFlight) -> str:
        """The move whose KV the engine holds until `commit`; "" where there is none. The KV cache stays at
        the relay as long as the engine has no room for it: a prefill would have none either."""
        partial, begun, engine = trajectory.partial, time.time(), self._engines.current
        name, (_, move_id) = partial.parked, parked_at(partial.parked)
        tokens = trajectory.group.prompt_tokens + tokens_of(partial).tolist()
        address = await self._room(trajectory, move_id, len(tokens))
        trajectory.partial = msgspec.structs.replace(partial, parked="")
        if not address:
            self._context.channel.send(TakeUp(name, ""))
            return ""
        prefix = 0
        try:
            if await self._came(name, address):
                prefix = await engine.kv_import(move_id, tokens, partial.routes)
        except (KvRefused, RequestFailed) as error:
            logger.warning("trajectory %d is prefilled again: %s", trajectory.trajectory_id, error)
        fields = {"trajectory_id": trajectory.trajectory_id, "came": True, "cached_tokens": prefix}
        self._context.trace.record("move", begun, time.time(), **fields)
        if not prefix:
            await engine.kv_abort(move_id)
        return move_id if prefix else ""

    async def _room(self, trajectory: TrajectoryInFlight, move_id: str, tokens: int) -> str:
        """The engine's address for it; "" if there is none within ROOM_SECONDS."""
        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            try:
                return await self._engines.current.kv_reserve(move_id, trajectory.weight_id, tokens)
            except (KvRefused, RequestFailed) as error:
                if time.monotonic() > deadline or trajectory.is_dropped():
                    logger.warning("trajectory %d is prefilled again: %s", trajectory.trajectory_id, error)
                    return ""
            await asyncio.sleep(LOOK_SECONDS)

    async def _came(self, name: str, address: str) -> bool:
        future = self._awaited[name] = asyncio.get_running_loop().create_future()
        self._context.channel.send(TakeUp(name, address))
        try:
            async with asyncio.timeout(TAKE_UP_SECONDS):
                return await future > 0
        except TimeoutError:
            return False
        finally:
            del self._awaited[name]

    async def commit(self, move_id: str) -> None:
        """The trajectory's request has been made: its KV may go when it does."""
        try:
            await self._engines.current.kv_commit(move_id)
        except (KvRefused, RequestFailed) as error:
            logger.warning("a KV cache that was taken up: %s", error)
