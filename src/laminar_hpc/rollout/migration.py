"""A replica's side of moves, as source and as destination; policies/moves.py is what the controller makes of
both.

    source        MoveOrder -> send KV while decoding goes on, stop the request, send the rest -> MoveReady
                            -> while it waits for a tool: send the KV that the prefix cache has -> MoveReady
                  ... MoveCommit | MoveAbort
    destination   Reserve -> room -> Reserved ... Import -> hold -> Imported
                  ... MoveCommit: it goes on here | MoveAbort

Where "..." stands the replica waits and sends its last message again every AGAIN_SECONDS; the controller
answers each time, a move that it does not know with MoveAbort. So a lost message is made up for, and every
wait ends. Where the KV cache does not arrive, the tokens do.
"""

import asyncio
import logging
import time
from typing import TypeVar

import msgspec

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.engine.interface import Engine, RequestFailed
from laminar_hpc.kv.errors import KvRefused
from laminar_hpc.messages.data import Message, Partial
from laminar_hpc.messages.moves import (
    Answer,
    Import,
    Imported,
    MoveAbort,
    MoveCommit,
    MoveFailed,
    MoveOrder,
    MoveReady,
    Reserve,
    Reserved,
)
from laminar_hpc.messages.rollouts import Lost
from laminar_hpc.rollout.answers import Answers
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.state import ReplicaState, WrongState
from laminar_hpc.rollout.work import Work, tokens_of

logger = logging.getLogger(__name__)
AGAIN_SECONDS = 2.0
FromController = Import | MoveCommit | MoveAbort
M = TypeVar("M", bound=FromController)


class ReplicaMigration:
    """Takes what the controller says of moves; its work is done in tasks of the local batch."""

    def __init__(
        self, context: RoleContext, batch: LocalBatch, state: ReplicaState, answers: Answers | None
    ) -> None:
        self.context, self.batch, self.state, self.answers = context, batch, state, answers
        self._mail: dict[str, asyncio.Queue[FromController]] = {}
        self._not_taken: dict[str, int] = {}  # trajectories of moves to here that an engine's end broke off
        self.imported: set[str] = set()  # moves that wait for MoveCommit or MoveAbort here
        batch.hand_over = self.hand_over
        if answers is not None:
            answers.hand_over = self.hand_over

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
                self._mail[message.move_id].put_nowait(message)
            else:
                self._too_late(message)

    async def _answer(self, message: MoveReady | Reserved | Imported, *wanted: type[M]) -> M:
        """Sends `message`, again and again, until one of the wanted answers comes."""
        mail = self._mail[message.move_id]
        self.context.channel.send(message)
        while True:
            try:
                async with asyncio.timeout(AGAIN_SECONDS):  # wait_for of 3.11 may swallow a cancellation
                    answer = await mail.get()
            except TimeoutError:
                self.context.channel.send(message)
                continue
            if isinstance(answer, wanted):
                return answer

    # ---- source --------------------------------------------------------------------------------------------

    def _order(self, order: MoveOrder) -> None:
        work = self.batch.works.get(order.trajectory_id)
        here = work is not None and work.attempt == order.attempt and not work.bound and work.order is None
        if work is None or not here or not (work.request_id or work.waits):
            self.context.channel.send(MoveFailed(order.move_id, "it does not run here"))
            return
        work.order = order
        if work.waits:
            self.batch.add(self._send_kept(order, work))
            work.ordered.set()
        else:
            self.batch.add(self._send(order, work, work.request_id or ""))

    async def _send(self, order: MoveOrder, work: Work, request_id: str) -> None:
        """What the order asks for; without KV, or where that fails, the request is only stopped."""
        engine, kv = self._engine, bool(order.address)
        try:
            if kv:
                await engine.kv_send(order.move_id, request_id, order.address)
                await engine.kv_detach(order.move_id, request_id)
        except (KvRefused, RequestFailed) as error:
            logger.warning("KV of trajectory %d stays here: %s", order.trajectory_id, error)
            await engine.kv_abort(order.move_id)
            kv = False
        if not kv:
            await engine.abort(request_id)
        if work.order is order:  # else its turn has ended meanwhile
            work.sent.set()

    async def _send_kept(self, order: MoveOrder, work: Work) -> None:
        """The same of one that waits for a tool."""
        tokens = work.group.prompt_tokens + tokens_of(work.partial).tolist()
        try:
            if order.address:
                namespace = str(work.weight_id)
                await self._engine.kv_send_kept(order.move_id, tokens, namespace, order.address)
        except (KvRefused, RequestFailed) as error:
            logger.warning("KV of trajectory %d stays here: %s", order.trajectory_id, error)
            await self._engine.kv_abort(order.move_id)
        work.sent.set()

    async def hand_over(self, work: Work) -> bool:
        """The request of a work with an order stands still, or it waits for a tool. Returns whether the work
        has moved away; else it goes on here."""
        order, t0 = work.order, time.time()
        assert order is not None
        await work.sent.wait()
        self._mail[order.move_id] = asyncio.Queue()
        try:
            outcome = await self._answer(MoveReady(order.move_id, work.partial), MoveCommit, MoveAbort)
        finally:
            del self._mail[order.move_id]
        gone = isinstance(outcome, MoveCommit)
        if order.address:
            await (self._engine.kv_commit(order.move_id) if gone else self._engine.kv_abort(order.move_id))
        tokens = work.partial.count
        self.context.trace.record(
            "move", t0, time.time(), trajectory_id=work.trajectory_id, gone=gone, tokens=tokens
        )
        return gone

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
        self._mail[reserve.move_id] = asyncio.Queue()
        self.batch.add(self._receive(reserve))

    async def _receive(self, reserve: Reserve) -> None:
        t0, move_id = time.time(), reserve.move_id
        try:
            taken = await self._take(reserve)
        except BaseException:
            self._broken_off(reserve)
            raise
        finally:
            del self._mail[move_id]
        if taken is None:
            if reserve.kv:
                await self._engine.kv_abort(move_id)
            self.state.finished()
            return
        (commit, partial), t1 = taken, time.time()
        work = Work(
            reserve.trajectory_id,
            commit.attempt,
            reserve.group,
            partial.spans[0].weight_id if partial.spans else reserve.weight_id,
            reserve.weight_step,
            reserve.temperature,
            reserve.max_response_tokens,
            partial=msgspec.structs.replace(partial, moves=partial.moves + 1),
        )
        self.batch.comes(work)
        # The request goes in before the commit: until it has the KV, the move holds it.
        parts = [self.batch.one(work), *([self._engine.kv_commit(move_id)] if reserve.kv else [])]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        trajectory_id, cached = reserve.trajectory_id, work.cached_tokens
        self.context.trace.record(
            "move", t0, t1, trajectory_id=trajectory_id, came=True, cached_tokens=cached
        )

    def _broken_off(self, reserve: Reserve) -> None:
        """The engine failed. If the controller has made this replica the owner already, it gives it back."""
        self.context.channel.send(MoveFailed(reserve.move_id, "its engine failed"))
        self._not_taken[reserve.move_id] = reserve.trajectory_id
        mail = self._mail[reserve.move_id]
        while not mail.empty():
            self._too_late(mail.get_nowait())

    def _too_late(self, message: FromController) -> None:
        trajectory_id = self._not_taken.get(message.move_id)
        if trajectory_id is not None and isinstance(message, MoveCommit):
            reason = "its engine failed while it came here"
            self.context.channel.send(Lost(trajectory_id, message.attempt, reason))

    async def _take(self, reserve: Reserve) -> tuple[MoveCommit, Partial] | None:
        """Room, the KV cache and the tokens; None when the move is off."""
        address, prefix = "", 0
        try:
            if reserve.kv:
                address = await self._engine.kv_reserve(reserve.move_id, reserve.weight_id, reserve.tokens)
        except (KvRefused, RequestFailed) as error:
            self.context.channel.send(MoveFailed(reserve.move_id, str(error)))
            return None
        arrival = await self._answer(Reserved(reserve.move_id, address), Import, MoveAbort)
        if not isinstance(arrival, Import):
            return None
        partial = arrival.partial
        if address:
            try:
                prefix = await self._engine.kv_import(
                    reserve.move_id, reserve.group.prompt_tokens + tokens_of(partial).tolist()
                )
            except (KvRefused, RequestFailed) as error:
                logger.warning("trajectory %d is prefilled again: %s", reserve.trajectory_id, error)
        self.imported.add(reserve.move_id)
        try:
            outcome = await self._answer(Imported(reserve.move_id, prefix), MoveCommit, MoveAbort)
        finally:
            self.imported.discard(reserve.move_id)
        return (outcome, partial) if isinstance(outcome, MoveCommit) else None
