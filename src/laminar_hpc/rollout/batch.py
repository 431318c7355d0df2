"""A local batch on its way through the engine: each trajectory request by request, until it has its last
token, is lost, or has moved away.

    Work --request--> stop, length -> ended(work, None), or ended(work, why it is lost)
              |-----> moved, abort -> migration.py: gone to another replica, or goes on here
              '-----> paused       -> goes on after `resume`

Owned by worker.py, which says what becomes of results; migration.py adds trajectories that come from
elsewhere. Nothing else is added to it.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.cluster.own_time import within
from laminar_hpc.engine.interface import Generation, RequestFailed, sampling_parameters
from laminar_hpc.messages.data import TOKEN_BYTES, VersionSpan
from laminar_hpc.messages.moves import MoveFailed
from laminar_hpc.messages.rollouts import Increment
from laminar_hpc.payload.layout import DamagedResponse, Logprobs, Tokens
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.state import ReplicaState
from laminar_hpc.rollout.work import Outcome, Work, columns, extended, objection

logger = logging.getLogger(__name__)
ABORT_AGAIN_SECONDS = 0.5

Turn = Callable[[Work], Coroutine[Any, Any, Outcome]]
# (work, one answer of the model) -> how it ended: the turns of a trajectory, see episodes.py
Turns = Callable[[Work, Turn], Coroutine[Any, Any, Outcome]]


class LocalBatch:
    """`ended(work, lost)`: it has its last token, or `lost` says why it will not. migration.py sets
    `hand_over(work)`, which says whether the work of a move has gone."""

    def __init__(
        self,
        context: RoleContext,
        engines: EngineLives,
        state: ReplicaState,
        stop_ids: list[int],
        ended: Callable[[Work, str | None], None],
        turns: Turns | None = None,
    ) -> None:
        self.context, self.config, self.engines, self.state = context, context.config, engines, state
        self.stop_ids, self.ended, self._turns = stop_ids, ended, turns
        self.hand_over: Callable[[Work], Coroutine[Any, Any, bool]] | None = None
        self.moved_away = 0  # trajectories that are with others, since `run` began
        self._size = 0  # trajectories that `run` began with
        self.progress = 0  # counts increments and ends of requests
        self.left: list[Work] = []  # what was under way when it failed
        self.works: dict[int, Work] = {}  # those with a task, by trajectory
        self.keep_kv = self.config.pipeline.keep_kv
        self.one_policy = self.config.pipeline.refresh != "interrupt"
        self._places = asyncio.Semaphore(self.config.rollout.max_concurrent)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] | None = None
        self._numbers = itertools.count()
        self._going = asyncio.Event()  # cleared while the engine stands still for other weights
        self._going.set()
        self._generating = 0
        self._quiet = asyncio.Event()

    # ---- tasks ---------------------------------------------------------------------------------------------

    def run(self, begin: Iterable[Work]) -> Coroutine[Any, Any, None]:
        """Until nothing is left of what it began with, which is among the works from this call on, and of
        what has come meanwhile. Raises EngineDied and what else a task raises."""
        works = list(begin)
        self.works |= {work.trajectory_id: work for work in works}
        return self._run(works)

    async def _run(self, works: list[Work]) -> None:
        self._over = asyncio.get_running_loop().create_future()
        self.moved_away, self._size = 0, len(works)
        for work in works:
            self.add(self.one(work))
        try:
            await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.works.clear()  # a task that is cancelled before its first step takes nothing back

    @property
    def under_way(self) -> bool:
        """It is being generated, so that somebody awaits what is added."""
        return self._over is not None and not self._over.done()

    def add(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs it as a task of this batch, which is not over before it ends."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._over is None or self._over.done() or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.fail(error)
        elif not self._tasks:
            self._over.set_result(None)

    @property
    def generating(self) -> bool:
        """Requests are in the engine, and it was not told to stand still."""
        return self._generating > 0 and self._going.is_set()

    @property
    def young(self) -> bool:
        """Most of what it began with is still under way."""
        return 2 * len(self.works) > self._size

    @property
    def waiting(self) -> list[Work]:
        """Those that wait for a tool."""
        return [work for work in self.works.values() if work.waits]

    def comes(self, work: Work) -> None:
        """It has moved here, and is this replica's from now on, also if the batch has failed just now."""
        self.works[work.trajectory_id] = work
        if not self.under_way:
            work.left = True
            self.left.append(work)

    def fail(self, error: BaseException) -> None:
        """`run` raises `error`; what is under way stands in `left`."""
        if self._over is not None and not self._over.done():
            self.left = list(self.works.values())
            for work in self.left:
                work.left = True
            self._over.set_exception(error)

    # ---- one trajectory ------------------------------------------------------------------------------------

    async def one(self, work: Work) -> None:
        """From where it is to its last token."""
        self.works[work.trajectory_id] = work
        try:
            outcome = await (self._turn(work) if self._turns is None else self._turns(work, self._turn))
        except Exception as error:
            self.fail(error)  # while it is among the works
            raise
        finally:
            if self.works.get(work.trajectory_id) is work:  # it may be back by now, as another work
                del self.works[work.trajectory_id]
        self.state.finished()
        if outcome.moved_away:
            self.moved_away += 1
        else:
            self.ended(work, outcome.lost)

    async def _turn(self, work: Work) -> Outcome:
        """One answer of the model; between two nobody waits for a place."""
        asked = time.time()
        async with self._places:
            work.waited = time.time() - asked
            outcome = await self._generate(work)
        if work.order is not None and not outcome.moved_away:
            self.context.channel.send(MoveFailed(work.order.move_id, outcome.lost or "it has ended"))
            work.order = None
            work.sent.clear()
        return outcome

    async def _generate(self, work: Work) -> Outcome:
        """Request after request: one that was interrupted is followed by another for the rest."""
        work.partial.time_started = work.partial.time_started or time.time()
        while work.room > 0:
            await self._going.wait()
            if work.is_dropped():
                return Outcome(moved_away=True)
            number = next(self._numbers)
            run_id = self.context.welcome.run_id
            work.request_id = f"{run_id}-{work.trajectory_id}-{work.attempt}-{number}"
            self._generating += 1
            try:
                generation = await self._request(work, work.request_id)
            except RequestFailed as error:
                if not self._going.is_set() or work.is_dropped():
                    continue  # it was refused because all stand still
                await self.engines.current.abort(work.request_id)
                return Outcome(lost=str(error))
            finally:
                work.request_id = None
                self._generating -= 1
                if not self._generating:
                    self._quiet.set()
            work.cached_tokens = work.cached_tokens or generation.cached_tokens
            try:
                work.partial, work.of_request = extended(work.partial, generation), None
            except DamagedResponse as error:
                return Outcome(lost=str(error))
            self.progress += 1
            work.finish_reason = generation.finish_reason
            if work.is_dropped() and work.order is None:
                return Outcome(moved_away=True)
            if generation.finish_reason in ("stop", "length"):
                return self._judged(work)
            if work.order is not None and self.hand_over is not None:
                if await self.hand_over(work):
                    return Outcome(moved_away=True)
                work.order = None
                work.sent.clear()
            elif self._going.is_set():
                return self._judged(work)
        work.finish_reason = "length"  # it was interrupted at its very last token
        return self._judged(work)

    def drop(self, gone: Callable[[Work], bool]) -> None:
        """Ends what belongs to others by now."""
        for work in filter(gone, self.works.values()):
            work.dropped = True
            work.ordered.set()
            if work.request_id:
                self.add(self.engines.current.abort(work.request_id))

    def tell_all(self) -> None:
        """All tokens so far of what runs, for a controller that knows none of them."""
        if not self.config.rollout.increment_tokens:
            return
        for work in self.works.values():
            if work.so_far.count and not work.evaluation:
                self._tell(work, 0)

    def _tell(self, work: Work, start: int) -> None:
        """Its tokens so far from `start` on."""
        known = work.so_far
        spans = [VersionSpan(s.weight_id, max(s.start, start), s.end) for s in known.spans if s.end > start]
        columns = known.tokens[TOKEN_BYTES * start :], known.logprobs[TOKEN_BYTES * start :]
        told = (work.trajectory_id, work.attempt, start, *columns, spans, known.time_started)
        self.context.channel.send(Increment(*told, known.called, known.awaits, known.home))
        work.told = known.count

    def _judged(self, work: Work) -> Outcome:
        weight_id = work.weight_id if self.one_policy else None
        return Outcome(lost=objection(work.partial, work.finish_reason, weight_id))

    async def _request(self, work: Work, request_id: str) -> Generation:
        """One request to the engine for all the tokens that are left. Increments go to the controller."""
        sampling = sampling_parameters(self.config.sampling, work.temperature, work.room, self.stop_ids)
        # an engine that is to be deterministic draws alike whatever has the same seed, or none
        sampling["sampling_seed"] = work.sampling_seed(self.config.seed)
        weight_id, start = self.state.weight_id, work.partial.count
        assert weight_id is not None

        def send_increment(tokens: Tokens, logprobs: Logprobs) -> None:
            nonlocal start
            self.progress += 1
            end, told = start + len(tokens), columns(tokens, logprobs)
            spans, so_far = [VersionSpan(weight_id, start, end)], work.partial
            more = Increment(work.trajectory_id, work.attempt, start, *told, spans, so_far.time_started)
            more.home = so_far.home
            self.context.channel.send(more)
            start = work.told = end
            work.streamed(weight_id, *told)

        wanted = 0 < self.config.rollout.increment_tokens < work.room and not (work.evaluation or work.bound)
        if wanted and work.told < start:  # an abort's last tokens: what comes must follow on what is known
            self._tell(work, work.told)
        return await self.engines.current.generate(
            work.sequence, sampling, request_id, str(weight_id), send_increment if wanted else None
        )

    # ---- interruption (refresh=interrupt) ------------------------------------------------------------------

    async def pause(self) -> None:
        """Every request stands still when it returns; its tokens are kept, with `keep_kv` its KV too."""
        self._going.clear()
        if self.keep_kv:
            await self.engines.current.pause()
            return
        async with within(self.config.rollout.request_timeout_seconds):
            await self._abort_all()

    async def _abort_all(self) -> None:
        """Returns when no request is in the engine. One that is on its way there it does not know yet: it is
        aborted again."""
        await self.engines.current.abort()
        while self._generating:
            self._quiet.clear()
            try:
                # wait_for of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(ABORT_AGAIN_SECONDS):
                    await self._quiet.wait()
            except TimeoutError:
                await self.engines.current.abort()

    async def break_off(self, seconds: float) -> list[Work]:
        """Every request ends where it is, for good; returns what has no last token. What the engine does not
        give back within `seconds` is known as far as its last request went."""
        self._going.clear()
        with contextlib.suppress(TimeoutError, RequestFailed):
            async with asyncio.timeout(seconds):
                await self._abort_all()
        return list(self.works.values())

    async def over(self) -> None:
        """Returns when no local batch is being generated."""
        if self._over is not None:
            await asyncio.wait([self._over])

    def resume(self) -> None:
        """Aborted requests are made again, on other weights. What the engine had paused goes on by itself:
        the weight loader has resumed the engine."""
        self._going.set()
