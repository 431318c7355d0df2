"""A replica's side of moves, as source and as destination; policies/moves.py is what the controller makes of
both.

    source        MoveOrder -> send KV while decoding goes on, stop the request, send the rest -> MoveReady
                            -> while it waits for a tool, or for its prefill: send the KV that the prefix
                               cache has -> MoveReady
                  ... MoveCommit | MoveAbort
    destination   Reserve -> room -> Reserved ... Import -> hold -> Imported
                  ... MoveCommit: it goes on here | MoveAbort

Where "..." stands the replica waits and says its last message again from time to time (move_source.py); the
controller answers each time, a move that it does not know with MoveAbort. If the KV cache does not arrive,
the tokens do.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from laminar_hpc.engine.interface import Engine, RequestFailed
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.line.messages.data import Message, Partial
from laminar_hpc.line.messages.moves import (
    Answer,
    Import,
    Imported,
    MoveAbort,
    MoveCommit,
    MoveFailed,
    MoveOrder,
    Reserve,
    Reserved,
)
from laminar_hpc.line.messages.rollouts import Lost
from laminar_hpc.rollout.answers import CallAnswers
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.in_flight import OrderedMove, TrajectoryInFlight
from laminar_hpc.rollout.move_source import FromController, MoveMail
from laminar_hpc.rollout.partial_response import tokens_of
from laminar_hpc.rollout.routes import taken_up
from laminar_hpc.rollout.state import WrongState

logger = logging.getLogger(__name__)


class ReplicaMigration:
    """Takes what the controller says of moves; its work is done in tasks of the local batch."""

    def __init__(self, batch: LocalBatch, mail: MoveMail, answers: CallAnswers | None) -> None:
        self.context = batch.context
        self.batch = batch
        self.state = batch.state
        self.answers = answers
        self._mail = mail
        self._not_taken: dict[str, int] = {}  # trajectories of moves to here that an engine's end broke off
        self.imported: set[str] = set()  # moves that wait for MoveCommit or MoveAbort here

    @property
    def _engine(self) -> Engine:
        return self.batch.engines.current

    def arrived(self, message: Message) -> None:
        """In the worker's event loop, in the order of arrival."""
        if isinstance(message, Reserve):
            self._reserve(message)
        elif isinstance(message, MoveOrder):
            self._order(message)
        elif isinstance(message, Answer) and self.answers is not None:
            self.answers.arrived(message)
        elif isinstance(message, Import | MoveCommit | MoveAbort):
            if message.move_id in self._mail:
                self._mail.arrived(message)
            else:
                self._too_late(message)

    # ---- source --------------------------------------------------------------------------------------------

    def _order(self, order: MoveOrder) -> None:
        trajectory = self.batch.trajectories.get(order.trajectory_id)
        if trajectory is None or trajectory.attempt != order.attempt or not trajectory.may_leave:
            self.context.channel.send(MoveFailed(order.move_id, "it does not run here"))
            return
        self.batch.add(self._send(trajectory, trajectory.leave(order), trajectory.request_id))

    async def _send(self, trajectory: TrajectoryInFlight, move: OrderedMove, request_id: str | None) -> None:
        """What the order asks for: the KV cache of its request, or what the prefix cache has of one that
        waits for a tool, or is not decoded yet. Without KV, or where that fails, the request is only
        stopped."""
        order, sent = move.order, False
        if request_id is not None:
            sent = bool(order.address) and await self._sent(order, self._send_running(order, request_id))
            if not sent:
                await self._engine.abort(request_id)
        if order.address and not sent and trajectory.move is move:
            await self._sent(order, self._send_kept(order, trajectory))
        move.sent.set()

    async def _send_running(self, order: MoveOrder, request_id: str) -> None:
        await self._engine.kv_send(order.move_id, request_id, order.address)
        await self._engine.kv_detach(order.move_id, request_id)

    async def _send_kept(self, order: MoveOrder, trajectory: TrajectoryInFlight) -> None:
        tokens = trajectory.group.prompt_tokens + tokens_of(trajectory.partial).tolist()
        await self._engine.kv_send_kept(order.move_id, tokens, str(trajectory.weight_id), order.address)

    async def _sent(self, order: MoveOrder, sending: Coroutine[Any, Any, None]) -> bool:
        try:
            await sending
        except (KvRefused, RequestFailed) as error:
            logger.warning("KV of trajectory %d stays here: %s", order.trajectory_id, error)
            await self._engine.kv_abort(order.move_id)
            return False
        return True

    # ---- destination ---------------------------------------------------------------------------------------

    def _reserve(self, reserve: Reserve) -> None:
        if reserve.move_id in self._mail:
            return
        if not self.batch.under_way:  # it was broken off
            self.context.channel.send(MoveFailed(reserve.move_id, "no local batch is being generated here"))
            return
        try:
            self.state.reserve(reserve.weight_id)
        except WrongState as refusal:
            self.context.channel.send(MoveFailed(reserve.move_id, str(refusal)))
            return
        self._mail.open(reserve.move_id)
        self.batch.add(self._receive(reserve))

    async def _receive(self, reserve: Reserve) -> None:
        t0, move_id = time.time(), reserve.move_id
        try:
            taken = await self._take(reserve)
        except BaseException:
            self._broken_off(reserve)
            raise
        self._mail.close(move_id)
        if taken is None:
            if reserve.kv:
                await self._engine.kv_abort(move_id)
            self.state.finished(reserve.weight_id)
            return
        (commit, partial, siblings), t1 = taken, time.time()
        if (shape := self.batch.route_shape) is not None:
            partial = taken_up(partial, len(reserve.group.prompt_tokens), shape)
        trajectory = TrajectoryInFlight(
            reserve.trajectory_id,
            commit.attempt,
            reserve.group,
            partial.spans[0].weight_id if partial.spans else reserve.weight_id,
            reserve.weight_step,
            reserve.temperature,
            reserve.max_response_tokens,
            partial=msgspec.structs.replace(partial, moves=partial.moves + 1),
            route_shape=shape,
            siblings=[siblings] if siblings else [],
            foreign=siblings,
        )
        self.batch.comes(trajectory)
        # The request goes in before the commit: until it has the KV, the move holds it.
        parts = [self.batch.one(trajectory), *([self._engine.kv_commit(move_id)] if reserve.kv else [])]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        trajectory_id, cached = reserve.trajectory_id, trajectory.cached_tokens
        self.context.trace.record(
            "move", t0, t1, trajectory_id=trajectory_id, came=True, cached_tokens=cached
        )

    def _broken_off(self, reserve: Reserve) -> None:
        """The engine failed. If the controller has made this replica the owner already, it gives it back."""
        self.context.channel.send(MoveFailed(reserve.move_id, "its engine failed"))
        self._not_taken[reserve.move_id] = reserve.trajectory_id
        for message in self._mail.close(reserve.move_id):
            self._too_late(message)

    def _too_late(self, message: FromController) -> None:
        trajectory_id = self._not_taken.get(message.move_id)
        if trajectory_id is not None and isinstance(message, MoveCommit):
            reason = "its engine failed while it came here"
            self.context.channel.send(Lost(trajectory_id, message.attempt, reason))

    async def _take(self, reserve: Reserve) -> tuple[MoveCommit, Partial, bytes] | None:
        """Room, the KV cache, the tokens, and those of its group; None when the move is off."""
        address, prefix = "", 0
        try:
            if reserve.kv:
                address = await self._engine.kv_reserve(reserve.move_id, reserve.weight_id, reserve.tokens)
        except (KvRefused, RequestFailed) as error:
            self.context.channel.send(MoveFailed(reserve.move_id, str(error)))
            return None
        arrival = await self._mail.ask(Reserved(reserve.move_id, address), Import, MoveAbort)
        if not isinstance(arrival, Import):
            return None
        partial = arrival.partial
        if address:
            try:
                prefix = await self._engine.kv_import(
                    reserve.move_id,
                    reserve.group.prompt_tokens + tokens_of(partial).tolist(),
                    partial.routes,
                )
            except (KvRefused, RequestFailed) as error:
                logger.warning("trajectory %d is prefilled again: %s", reserve.trajectory_id, error)
        self.imported.add(reserve.move_id)
        try:
            outcome = await self._mail.ask(Imported(reserve.move_id, prefix), MoveCommit, MoveAbort)
        finally:
            self.imported.discard(reserve.move_id)
        return (outcome, partial, arrival.siblings) if isinstance(outcome, MoveCommit) else None
