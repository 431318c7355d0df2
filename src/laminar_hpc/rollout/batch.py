"""A local batch on its way through the engine: each trajectory request by request, until it has its last
token, is lost, or has moved away.

    granted --request--> stop, length -> ended: it is whole, or lost
                |------> moved, abort -> move_source.py: gone to another replica, or goes on here
                '------> paused       -> goes on after `resume`

Owned by worker.py, which says what becomes of results; migration.py adds trajectories that come from
elsewhere. Nothing else is added to it.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import replayed_routes
from laminar_hpc.engine.interface import Generation, RequestFailed, sampling_parameters
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.moves import MoveFailed
from laminar_hpc.machine.own_time import within
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.in_flight import Outcome, State, TrajectoryInFlight
from laminar_hpc.rollout.move_source import HandOver
from laminar_hpc.rollout.partial_response import columns, objection
from laminar_hpc.rollout.siblings import are_wanted, as_tokens
from laminar_hpc.rollout.state import ReplicaState
from laminar_hpc.rollout.taking_up import TakingUp
from laminar_hpc.store.payload.layout import DamagedResponse, Logprobs, Tokens

ABORT_AGAIN_SECONDS = 0.5

Turn = Callable[[TrajectoryInFlight], Coroutine[Any, Any, Outcome]]
# (trajectory, one answer of the model, whether the batch is young) -> how it ended: see episodes.py
Turns = Callable[[TrajectoryInFlight, Turn, Callable[[], bool]], Coroutine[Any, Any, Outcome]]


class LocalBatch:
    """`ended(trajectory, outcome)`: it has its last token, or `outcome.lost` says why it will not."""

    def __init__(
        self,
        context: RoleContext,
        engines: EngineLives,
        state: ReplicaState,
        stop_ids: list[int],
        ended: Callable[[TrajectoryInFlight, Outcome], None],
        hand_over: HandOver,
        turns: Turns | None,
    ) -> None:
        self.context = context
        self.config = context.config
        self.engines = engines
        self.state = state
        self.stop_ids = stop_ids
        self.ended = ended
        self._hand_over = hand_over
        self._turns = turns or (lambda trajectory, turn, _: turn(trajectory))
        self.moved_away = 0  # trajectories that are with others, since `run` began
        self._size = 0  # trajectories that `run` began with
        self.progress = 0  # counts increments and ends of requests
        self.left: list[TrajectoryInFlight] = []  # what was under way when it failed
        self.taking_up = TakingUp(context, engines)
        self.trajectories: dict[int, TrajectoryInFlight] = {}  # those with a task, by trajectory
        self.keep_kv = self.config.pipeline.keep_kv
        self.route_shape = replayed_routes(self.config, model_config(self.config.model.path))
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

    def run(self, begin: Iterable[TrajectoryInFlight]) -> Coroutine[Any, Any, None]:
        """Until nothing is left of what it began with, which is in `trajectories` from this call on, and of
        what has come meanwhile. Raises EngineDied and what else a task raises."""
        trajectories = list(begin)
        self.trajectories |= {trajectory.trajectory_id: trajectory for trajectory in trajectories}
        return self._run(trajectories)

    async def _run(self, trajectories: list[TrajectoryInFlight]) -> None:
        self._over = asyncio.get_running_loop().create_future()
        self.moved_away = 0
        self._size = len(trajectories)
        for trajectory in trajectories:
            self.add(self.one(trajectory))
        try:
            await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.trajectories.clear()  # a task that is cancelled before its first step takes nothing back

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
        return 2 * len(self.trajectories) > self._size

    @property
    def waiting(self) -> list[TrajectoryInFlight]:
        """Those that wait for a tool."""
        return [trajectory for trajectory in self.trajectories.values() if trajectory.state is State.WAITING]

    def comes(self, trajectory: TrajectoryInFlight) -> None:
        """It has moved here, and is this replica's from now on, also if the batch has failed just now."""
        self.trajectories[trajectory.trajectory_id] = trajectory
        if not self.under_way:
            trajectory.strand()
            self.left.append(trajectory)

    def fail(self, error: BaseException) -> None:
        """`run` raises `error`; what is under way stands in `left`."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)
            self.left = list(self.trajectories.values())
            for trajectory in self.left:
                trajectory.strand()

    # ---- one trajectory ------------------------------------------------------------------------------------

    async def one(self, trajectory: TrajectoryInFlight) -> None:
        """From where it is to its last token."""
        self.trajectories[trajectory.trajectory_id] = trajectory
        try:
            if trajectory.partial.parked and (move_id := await self.taking_up.take_up(trajectory)):
                self.add(self.taking_up.commit(move_id))  # runs when the request is on its way
            outcome = await self._turns(trajectory, self._turn, lambda: self.young)
        except Exception as error:
            self.fail(error)  # while it is among the trajectories
            raise
        finally:
            # it may have come back by now, as another object
            if self.trajectories.get(trajectory.trajectory_id) is trajectory:
                del self.trajectories[trajectory.trajectory_id]
        self.state.finished(trajectory.weight_id)
        if outcome.moved_away:
            self.moved_away += 1
        else:
            if outcome.lost is None and are_wanted(self.config.rollout):
                trajectory.siblings.append(trajectory.partial.tokens)
            self.ended(trajectory, outcome)

    async def _turn(self, trajectory: TrajectoryInFlight) -> Outcome:
        """One answer of the model; between two nobody waits for a place."""
        asked = time.time()
        async with self._places:
            trajectory.waited = time.time() - asked
            outcome = await self._generate(trajectory)
        if trajectory.move is not None and not outcome.moved_away:
            move_id = trajectory.move.order.move_id
            self.context.channel.send(MoveFailed(move_id, outcome.lost or "it has ended"))
            trajectory.stay()
        return outcome

    async def _generate(self, trajectory: TrajectoryInFlight) -> Outcome:
        """Request after request: one that was interrupted is followed by another for the rest."""
        trajectory.partial.time_started = trajectory.partial.time_started or time.time()
        while trajectory.room > 0:
            await self._going.wait()
            if trajectory.is_dropped():
                return Outcome(moved_away=True)
            number = next(self._numbers)
            run_id = self.context.welcome.run_id
            trajectory.request_id = f"{run_id}-{trajectory.trajectory_id}-{trajectory.attempt}-{number}"
            self._generating += 1
            try:
                generation = await self._request(trajectory, trajectory.request_id)
            except RequestFailed as error:
                if not self._going.is_set() or trajectory.is_dropped():
                    continue  # it was refused because all stand still
                await self.engines.current.abort(trajectory.request_id)
                return Outcome(lost=str(error))
            finally:
                trajectory.request_id = None
                self._generating -= 1
                if not self._generating:
                    self._quiet.set()
            trajectory.cached_tokens = trajectory.cached_tokens or generation.cached_tokens
            try:
                trajectory.add(generation)
            except DamagedResponse as error:
                return Outcome(lost=str(error))
            self.progress += 1
            trajectory.finish_reason = generation.finish_reason
            if trajectory.is_dropped() and trajectory.move is None:
                return Outcome(moved_away=True)
            if generation.finish_reason in ("stop", "length"):
                return self._judged(trajectory)
            if trajectory.move is not None:
                if await self._hand_over(trajectory):
                    return Outcome(moved_away=True)
                trajectory.stay()
            elif self._going.is_set():
                return self._judged(trajectory)
        trajectory.finish_reason = "length"  # it was interrupted at its very last token
        return self._judged(trajectory)

    def drop(self, gone: Callable[[TrajectoryInFlight], bool]) -> None:
        """Ends what belongs to others by now."""
        for trajectory in filter(gone, self.trajectories.values()):
            trajectory.drop()
            if trajectory.request_id:
                self.add(self.engines.current.abort(trajectory.request_id))

    def tell_all(self) -> None:
        """All tokens so far of what runs, for a controller that knows none of them."""
        if not self.config.rollout.increment_tokens:
            return
        for trajectory in self.trajectories.values():
            if trajectory.is_told and trajectory.so_far.count:
                self.context.channel.send(trajectory.increment(0))

    def _judged(self, trajectory: TrajectoryInFlight) -> Outcome:
        weight_id = trajectory.weight_id if self.one_policy else None
        return Outcome(lost=objection(trajectory.partial, trajectory.finish_reason, weight_id))

    async def _request(self, trajectory: TrajectoryInFlight, request_id: str) -> Generation:
        """One request to the engine for all the tokens that are left. Increments go to the controller."""
        settings, room = self.config.rollout, trajectory.room
        sampling = sampling_parameters(self.config.sampling, trajectory.temperature, room, self.stop_ids)
        # an engine that is to be deterministic draws alike whatever has the same seed, or none
        sampling["sampling_seed"] = trajectory.sampling_seed(self.config.seed)
        if trajectory.foreign:
            sampling["guess_from"] = as_tokens(trajectory.foreign)
            trajectory.foreign = b""
        weight_id = trajectory.weight_id if self.one_policy else self.state.weight_id
        assert weight_id is not None
        trajectory.of_request = None

        def send_increment(tokens: Tokens, logprobs: Logprobs) -> None:
            self.progress += 1
            self.context.channel.send(trajectory.streamed(weight_id, *columns(tokens, logprobs)))

        wanted = 0 < settings.increment_tokens < room and trajectory.is_told
        # an abort's last tokens: what comes must follow on what is known
        if wanted and trajectory.told < trajectory.partial.count:
            self.context.channel.send(trajectory.increment(trajectory.told))
        on_tokens, routes_from = send_increment if wanted else None, trajectory.asks_routes_from()
        more = {} if routes_from is None else {"routes_from": routes_from}
        return await self.engines.current.generate(
            trajectory.sequence, sampling, request_id, str(weight_id), on_tokens, **more
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
        """Returns when no request is in the engine. One on its way there is unknown, and aborted again."""
        await self.engines.current.abort()
        while self._generating:
            self._quiet.clear()
            try:
                # wait_for of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(ABORT_AGAIN_SECONDS):
                    await self._quiet.wait()
            except TimeoutError:
                await self.engines.current.abort()

    async def break_off(self, seconds: float) -> list[TrajectoryInFlight]:
        """Every request ends where it is, for good; returns what has no last token. What the engine does not
        give back within `seconds` is known as far as its last request went."""
        self._going.clear()
        with contextlib.suppress(TimeoutError, RequestFailed):
            async with asyncio.timeout(seconds):
                await self._abort_all()
        return list(self.trajectories.values())

    async def over(self) -> None:
        """Returns when no local batch is being generated."""
        if self._over is not None:
            await asyncio.wait([self._over])

    def resume(self) -> None:
        """Aborted requests are made again, on other weights. What the engine had paused goes on by itself:
        the weight loader has resumed the engine."""
        self._going.set()
