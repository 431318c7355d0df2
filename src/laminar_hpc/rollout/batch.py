"""A local batch on its way through the engine: trajectories part by part, until the last one ends, is lost,
or has moved away.

    Work --generate--> part --stop, length--> done(work) | lost(work)
                         |--ordered away----> migration.py: gone, or goes on here
                         '--paused----------> goes on after `resume`

Owned by worker.py, which says what becomes of results; migration.py adds trajectories that come from
elsewhere. Nothing else is added to it.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.messages import (
    Grant,
    Increment,
    MoveFailed,
    MoveOrder,
    Partial,
    PromptGroup,
    Sample,
    Trajectory,
    VersionSpan,
)
from laminar_hpc.rollout.sglang_server import Generation, RequestFailed, sampling_parameters
from laminar_hpc.rollout.state import ReplicaState
from laminar_hpc.rollout.weight_loader import WeightLoader

logger = logging.getLogger(__name__)


@dataclass
class Work:
    """A trajectory that this replica owns. `weight_id` and `weight_step` are those that it began with."""

    trajectory_id: int
    attempt: int
    group: PromptGroup
    weight_id: int
    weight_step: int
    temperature: float
    max_response_tokens: int
    evaluation: str = ""
    partial: Partial = field(default_factory=Partial)
    finish_reason: str = ""
    request_id: str = ""  # while the engine has it
    cached_tokens: int = 0  # of what it began with here, whose KV was there
    order: MoveOrder | None = None  # it is to move away
    sent: asyncio.Event = field(default_factory=asyncio.Event)  # all that the order asks for has been sent

    @property
    def room(self) -> int:
        """Response tokens that it may still get."""
        return self.max_response_tokens - len(self.partial.tokens)


def works(grant: Grant) -> list[Work]:
    def work(group: PromptGroup, sample: Sample) -> Work:
        return Work(
            sample.trajectory_id,
            sample.attempt,
            group,
            grant.weight_id,
            grant.weight_step,
            grant.temperature,
            grant.max_response_tokens,
            grant.evaluation,
            grant.parts.get(sample.trajectory_id) or Partial(),
        )

    return [work(group, sample) for group in grant.groups for sample in group.samples]


def extended(partial: Partial, generation: Generation) -> Partial:
    """With one more part; spans of the same weights that meet become one."""
    at, spans = len(partial.tokens), list(partial.spans)
    for span in generation.spans:
        if spans and spans[-1].weight_id == span.weight_id and spans[-1].end == at + span.start:
            spans[-1] = VersionSpan(span.weight_id, spans[-1].start, at + span.end)
        else:
            spans.append(VersionSpan(span.weight_id, at + span.start, at + span.end))
    tokens, logprobs = partial.tokens + generation.tokens, partial.logprobs + generation.logprobs
    return Partial(tokens, logprobs, spans, partial.time_started, partial.moves)


def first_not_finite(logprobs: Sequence[float]) -> int | None:
    """Place of the first log-prob that is NaN or infinite."""
    return next((i for i, value in enumerate(logprobs) if not math.isfinite(value)), None)


def objection(generation: Generation, weight_id: int | None) -> str:
    """Why this response must not be trained on, or "". One trajectory, one policy, by the engine's own report
    (docs/architecture.md#one-policy); with `weight_id` None several are meant.

    Log-probs that are not finite: the trainer never publishes weights that are not, so the engine's
    arithmetic overflowed. That may be chance, so the trajectory alone is lost and generated again. It is not
    chance when a whole local batch comes out so, or one trajectory MOST_OVERFLOWS times: then worker.py ends
    the replica, and with it a run in one torchrun.
    """
    if generation.finish_reason not in ("stop", "length"):
        return f"the engine ended it with {generation.finish_reason}"
    if not generation.tokens:
        return "the engine returned no token"
    ids = [span.weight_id for span in generation.spans]
    if weight_id is not None and ids != [weight_id]:
        return f"generated with weight ids {ids} instead of {weight_id}"
    if (place := first_not_finite(generation.logprobs)) is not None:
        return f"the log-prob of response token {place} is not finite"
    return ""


def trajectory(work: Work, replica: int) -> Trajectory:
    partial = work.partial
    return Trajectory(
        trajectory_id=work.trajectory_id,
        group_id=work.group.group_id,
        attempt=work.attempt,
        replica=replica,
        weight_id=work.weight_id,
        weight_step=work.weight_step,
        prompt_tokens=work.group.prompt_tokens,
        response_tokens=partial.tokens,
        logprobs=partial.logprobs,
        loss_mask=[1] * len(partial.tokens),
        finish_reason=work.finish_reason,
        version_spans=partial.spans,
        time_started=partial.time_started,
        time_finished=time.time(),
        moves=partial.moves,
    )


class LocalBatch:
    """`ended(work, reason)`: it has its last token (reason "") or is lost. `hand_over(work)`: whether an
    ordered work has gone."""

    def __init__(
        self,
        context: RoleContext,
        weight_loader: WeightLoader,
        state: ReplicaState,
        stop_ids: list[int],
        ended: Callable[[Work, str], None],
    ) -> None:
        self.context, self.config, self.weight_loader, self.state, self.stop_ids, self.ended = (
            context,
            context.config,
            weight_loader,
            state,
            stop_ids,
            ended,
        )
        self.hand_over: Callable[[Work], Coroutine[None, None, bool]] | None = None
        self.moved_away = 0  # of this run
        self.works: dict[int, Work] = {}  # those with a task, by trajectory
        self.keep_kv = self.config.pipeline.keep_kv
        self.one_policy = self.config.pipeline.refresh != "interrupt"
        self._places = asyncio.Semaphore(self.config.rollout.max_concurrent)
        self._tasks: set[asyncio.Task] = set()
        self._over: asyncio.Future[None] | None = None
        self._numbers = itertools.count()
        self._going = asyncio.Event()  # cleared while the engine stands still for other weights
        self._going.set()
        self._generating = 0
        self._quiet = asyncio.Event()

    # ---- tasks ---------------------------------------------------------------------------------------------

    async def run(self, begin: Iterable[Work]) -> None:
        """Until nothing is left of what it began with and what has come meanwhile. Raises EngineDied and what
        else a task raises."""
        self._over = asyncio.get_running_loop().create_future()
        self.moved_away = 0
        for work in begin:
            self.add(self.one(work))
        try:
            await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._over = None

    def add(self, coroutine: Coroutine) -> None:
        """A part of this batch: it is not over before."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if self._over is None or self._over.done() or task.cancelled():
            return
        if task.exception() is not None:
            self._over.set_exception(task.exception())
        elif not self._tasks:
            self._over.set_result(None)

    # ---- one trajectory ------------------------------------------------------------------------------------

    async def one(self, work: Work) -> None:
        """From where it is to its last token."""
        self.works[work.trajectory_id] = work
        try:
            async with self._places:
                reason = await self._generate(work)
        finally:
            if self.works.get(work.trajectory_id) is work:  # it may be back by now, as another work
                del self.works[work.trajectory_id]
        self.state.finished()
        if reason == "moved":
            self.moved_away += 1
        else:
            if work.order is not None:
                self.context.channel.send(MoveFailed(work.order.move_id, reason or "it has ended"))
            self.ended(work, reason)

    async def _generate(self, work: Work) -> str:
        """Part after part; returns why it is lost, "moved", or ""."""
        work.partial.time_started = work.partial.time_started or time.time()
        while work.room > 0:
            await self._going.wait()
            work.request_id = (
                f"{self.context.welcome.run_id}-{work.trajectory_id}-{work.attempt}-{next(self._numbers)}"
            )
            self._generating += 1
            try:
                generation = await self._part(work)
            except RequestFailed as error:
                if not self._going.is_set():
                    continue  # it was refused because all stand still
                await self.weight_loader.engine.abort(work.request_id)
                return str(error)
            finally:
                work.request_id = ""
                self._generating -= 1
                if not self._generating:
                    self._quiet.set()
            work.cached_tokens = work.cached_tokens or generation.cached_tokens
            work.partial = extended(work.partial, generation)
            work.finish_reason = generation.finish_reason
            if generation.finish_reason in ("stop", "length"):
                return self._objection(work)
            if work.order is not None and self.hand_over is not None:
                if await self.hand_over(work):
                    return "moved"
                work.order = None
                work.sent.clear()
            elif self._going.is_set():
                return self._objection(work)
        work.finish_reason = "length"  # it stood still at its very last token
        return self._objection(work)

    def _objection(self, work: Work) -> str:
        whole = Generation(work.partial.tokens, work.partial.logprobs, work.finish_reason, work.partial.spans)
        return objection(whole, work.weight_id if self.one_policy else None)

    async def _part(self, work: Work) -> Generation:
        sampling = sampling_parameters(self.config.sampling, work.temperature, work.room, self.stop_ids)
        weight_id, place = self.state.weight_id, len(work.partial.tokens)

        def increment(tokens: list[int], logprobs: list[float]) -> None:
            nonlocal place
            spans = [VersionSpan(weight_id, place, place + len(tokens))]
            self.context.channel.send(
                Increment(
                    work.trajectory_id,
                    work.attempt,
                    place,
                    tokens,
                    logprobs,
                    spans,
                    work.partial.time_started,
                )
            )
            place += len(tokens)

        on_tokens = increment if self.config.rollout.increment_tokens and not work.evaluation else None
        prompt = work.group.prompt_tokens + work.partial.tokens
        return await self.weight_loader.engine.generate(
            prompt, sampling, work.request_id, str(weight_id), on_tokens
        )

    # ---- interruption (refresh=interrupt) ------------------------------------------------------------------

    async def pause(self) -> None:
        """Every request stands still when it returns; what they have generated is kept, with `keep_kv` in the
        engine."""
        self._going.clear()
        if self.keep_kv:
            await self.weight_loader.engine.pause()
            return
        self._quiet.clear()
        await self.weight_loader.engine.abort()
        if self._generating:
            await asyncio.wait_for(self._quiet.wait(), self.config.rollout.request_timeout_seconds)

    def resume(self) -> None:
        """With other weights; the weight_loader has let the engine go on where it had been paused."""
        self._going.set()
