"""The rollout role: one replica with its engine, its weights and its reward workers. `run(context)` is what
its rank executes.

    start the engine from model.path (unverified) | wait for the first slot
    forever: a newer slot is there -> pull, verify, WeightsOpened
                                      (refresh=interrupt: also in the middle of a local batch)
             RequestWork           -> wait for a Grant, or for newer weights (then pull and ask again)
             Grant                 -> all its requests at once; Generated as each ends; scores go out behind
                                      and delay nothing
             Grant with parts      -> the same, of trajectories whose replica has died; on their weights,
                                      which are pulled from an older slot

What is allowed when stands in state.py, how weights are replaced in weight_loader.py, how a local batch is
generated in batch.py, and how parts of it go to other replicas in migration.py. Waits for: the relay's first
slot (bounded), a Grant (bounded by the controller's heartbeat). Waited for by: the controller, for Generated
and Scored.
"""

import asyncio
import dataclasses
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Coroutine
from pathlib import Path

from laminar_hpc.cluster.channel import StopReceived
from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.messages import (
    Generated,
    Grant,
    Lost,
    Message,
    NotLoaded,
    Ping,
    PromptGroup,
    ReplicaLoad,
    RequestWork,
    Scored,
    Trajectory,
    WeightsAvailable,
    WeightsOpened,
    Welcome,
)
from laminar_hpc.policies.sizing import saturation_requests
from laminar_hpc.rollout.batch import LocalBatch, Work, first_not_finite, trajectory, works
from laminar_hpc.rollout.migration import ReplicaMigration
from laminar_hpc.rollout.sglang_server import SglangServer
from laminar_hpc.rollout.state import ReplicaState, WrongState
from laminar_hpc.rollout.tokens import TextDecoder, model_config, stop_token_ids
from laminar_hpc.rollout.weight_loader import OVERFLOW_CURE, WeightLoader
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.slots import SlotGone, SlotReader

logger = logging.getLogger(__name__)
LOAD_SECONDS = 1.0
CURVE_MOST, CURVE_CONTEXT = 256, 64  # requests and tokens of each, up to which the decode curve is measured
RATE_SECONDS = 30.0  # over which tokens per second are counted
MOST_OVERFLOWS = 3  # of one trajectory on one replica, see batch.objection
# one may be bad luck (a time-out); an engine that refuses everything must not be fed for ever
MAX_LOST_BATCHES_IN_A_ROW = 3


def run(context: RoleContext) -> None:
    """Serves until the controller says Stop. Raises LaminarError when the replica cannot go on."""
    asyncio.run(RolloutWorker(context).run())


class RolloutWorker:
    """`pool`: of reward workers that several replicas of one process share; the caller starts and closes
    it."""

    def __init__(self, context: RoleContext, pool: RewardPool | None = None) -> None:
        self.context = context
        self.own_pool = pool is None
        self.config = context.config
        self.state = ReplicaState()
        model = Path(self.config.model.path)
        self.decoder = TextDecoder(model)
        self.stop_ids = stop_token_ids(model)
        self.pool = pool or RewardPool(self.config.reward, self.config.data.prompt_field)
        self.reader = SlotReader(self.config.relay.shm_dir, context.welcome.run_id)
        probe = probe_sequences(model_config(model)["vocab_size"])
        self.engine_starts = 0
        self.weight_loader = WeightLoader(
            self.reader, probe, context.trace, self._new_engine, self._engine_seed
        )
        self.interrupts = self.config.pipeline.refresh == "interrupt"
        self.pulling = asyncio.Lock()
        self.batch = LocalBatch(context, self.weight_loader, self.state, self.stop_ids, self._ended)
        self.migration = ReplicaMigration(context, self.batch, self.state)
        self.batch_max = 0  # requests that saturate the engine; 0 = not measured
        self.tokens = 0  # of the responses of this local batch
        self.grants: deque[Grant] = deque()
        self.seen = -1  # the newest batch that was granted
        self.wake = asyncio.Event()  # a grant or newer weights
        self.ask_again = False
        self.scoring: set[asyncio.Task] = set()
        # (when, response tokens) of the trajectories of the last RATE_SECONDS
        self.ended: deque[tuple[float, int]] = deque()
        # responses with log-probs that are not finite, by trajectory
        self.overflows: Counter[tuple[str, int]] = Counter()
        self.overflowed = 0  # of this local batch
        self.lost_batches_in_a_row = 0  # local batches in a row of which everything was lost

    def _new_engine(self) -> SglangServer:
        if self.config.rollout.engine == "emulated":
            from laminar_hpc.emulation.engine import EmulatedEngine

            return EmulatedEngine(self.config, self.context.index, self.context.run_dir)  # type: ignore[return-value]
        return SglangServer(self.config, self.context.index, self.context.run_dir)

    def _engine_seed(self) -> int:
        """Another seed for each start of each engine, so that nothing is drawn twice; the same ones for the
        same run.seed."""
        self.engine_starts += 1
        replica, restored_step = self.context.index, self.context.welcome.restored_step
        name = f"{self.config.seed}/{replica}/{restored_step}/{self.engine_starts}"
        return random.Random(name).randrange(2**31)

    # ---- life ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.leaving: asyncio.Future = loop.create_future()
        self.context.channel.subscribe(lambda item: loop.call_soon_threadsafe(self._arrived, item))
        reporting = asyncio.create_task(self._report_load())
        try:
            await self._guarded(self._start())
            while True:
                await self._guarded(self._turn())
        except StopReceived as stop:
            logger.info("rollout %d leaves: %s", self.context.index, stop.reason)
            await self._settle_scores()
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            if self.own_pool:
                await self.pool.close()
            self.weight_loader.let_go()
            await self.weight_loader.engine.stop()

    async def _report_load(self) -> None:
        """Once a second, or more often for repack, what the next ping will say of this replica."""
        pipeline = self.config.pipeline
        while True:
            engine, state = await self.weight_loader.engine.load_info(), self.state
            of_engine = dataclasses.asdict(engine) if engine else {}
            while self.ended and self.ended[0][0] < time.monotonic() - RATE_SECONDS:
                self.ended.popleft()
            rate = sum(tokens for _, tokens in self.ended) / RATE_SECONDS
            self.context.channel.load = ReplicaLoad(
                state.phase.value,
                state.weight_id,
                state.in_flight,
                len(self.scoring),
                tokens_per_second=rate,
                batch_max=self.batch_max,
                **of_engine,
            )
            if pipeline.repack == "off":
                await asyncio.sleep(LOAD_SECONDS)
            else:  # each look of the planner shall see what is now
                self.context.channel.send(Ping(self.context.channel.load))
                await asyncio.sleep(min(LOAD_SECONDS, pipeline.repack_seconds))

    def _arrived(self, item: Message | Exception) -> None:
        if isinstance(item, Exception):
            if not self.leaving.done():
                self.leaving.set_exception(item)
        elif isinstance(item, Grant):
            self._granted(item)
            self.wake.set()
        elif isinstance(item, WeightsAvailable):
            self.wake.set()
        elif isinstance(item, Welcome):
            # the controller had taken this replica for dead: it knows of no request
            self.ask_again = True
            self.wake.set()
        else:
            self.migration.arrived(item)

    def _granted(self, grant: Grant) -> None:
        """Its weights are held from here on where they are older ones: the engine may have to start first,
        while newer weights come."""
        self.seen = grant.batch_id
        try:
            if self._goes_back(grant):
                self.weight_loader.hold(grant.weight_id)
            self.grants.append(grant)
        except SlotGone as gone:
            self._not_loaded(grant, gone)

    def _goes_back(self, grant: Grant) -> bool:
        return bool(grant.parts) and grant.weight_id != self.state.weight_id

    def _not_loaded(self, grant: Grant, gone: SlotGone) -> None:
        self.context.channel.send(NotLoaded(grant.batch_id, str(gone)))
        self.ask_again = True

    async def _guarded(self, work: Coroutine) -> None:
        """Runs `work` until it ends, the engine dies, or the controller says Stop or falls silent; raises in
        the latter cases."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self.leaving), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.leaving.result()
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _start(self) -> None:
        """Engine and reward workers at once, while the trainer loads and publishes; then the first
        weights."""
        t0 = time.time()
        engine = self.weight_loader.engine
        with self.context.trace.span("load", what="engine"):
            pool = [self.pool.start()] if self.own_pool else []
            await asyncio.gather(
                *pool, engine.start(Path(self.config.model.path), "unverified", self._engine_seed())
            )
        logger.info("engine %d answered after %.1f s", self.context.index, time.time() - t0)
        limit = self.config.cluster.join_timeout_seconds
        with self.context.trace.span("wait", what="first weights"):
            while self.reader.newest() is None:
                if time.time() - t0 > limit:
                    who = (
                        f"rollout {self.context.index} waited {limit:g} s for the first weights of its relay"
                    )
                    raise LaminarError(
                        f"{who} under {self.reader.root} and gave up: "
                        "see the logs of the relay and of trainer 0"
                    )
                await asyncio.sleep(0.05)

    async def _settle_scores(self) -> None:
        limit = min(self.config.reward.timeout_seconds, self.config.cluster.stop_timeout_seconds / 2)
        if self.scoring:
            _, late = await asyncio.wait(self.scoring, timeout=limit)
            if late:
                logger.warning("%d scores were not there %g s after Stop and are dropped", len(late), limit)

    # ---- one turn: weights, then work ----------------------------------------------------------------------

    async def _turn(self) -> None:
        if not self.grants:  # else there is work already, on older weights perhaps
            if self._newer_weights():
                await self._pull()
            self.ask_again = False
            self.context.channel.send(RequestWork(self.state.weight_id, self.seen))
        grant = await self._next_grant()
        if grant is not None:
            await self._local_batch(grant)

    def _newer_weights(self) -> bool:
        newest = self.reader.newest()
        return newest is not None and newest.weight_id > self.state.weight_id

    async def _pull(self, interrupted: bool = False, back_to: int | None = None) -> None:
        """The newest weights, or those of `back_to`. Raises SlotGone only with the latter."""
        newest = self.reader.newest()
        ahead = newest.weight_id if newest else self.state.weight_id + 1
        self.state.begin_pull(ahead if back_to is None else back_to, interrupted, back=back_to is not None)
        try:
            pulled = await self.weight_loader.pull(self.batch.keep_kv if interrupted else False, back_to)
        except SlotGone:
            self.state.failed()
            raise
        if (
            self.batch_max == 0
            and self.config.pipeline.repack != "off"
            and self.config.pipeline.repack_requests is None
        ):
            curve = await self.weight_loader.engine.decode_curve(
                min(CURVE_MOST, self.config.rollout.max_concurrent), CURVE_CONTEXT
            )
            self.batch_max = saturation_requests(curve)
            logger.info(
                "decode curve (requests, seconds per step) %s: %d requests saturate the engine",
                curve,
                self.batch_max,
            )
        self.state.verified(pulled.weight_id)
        self.state.open(pulled.weight_step)
        self.context.channel.send(
            WeightsOpened(
                pulled.weight_id,
                pulled.weight_step,
                pulled.seconds,
                pulled.parts,
                pulled.probe_logprobs,
                time.time(),
            )
        )

    async def _next_grant(self) -> Grant | None:
        """A grant, or None when newer weights came first or the request must be made again. Raises
        EngineDied."""
        dead = asyncio.create_task(self.weight_loader.engine.process.dead.wait())
        try:
            with self.context.trace.span("wait", what="work"):
                while not self.grants and not self._newer_weights() and not self.ask_again:
                    self.wake.clear()
                    woken = asyncio.create_task(self.wake.wait())
                    await asyncio.wait((woken, dead), return_when=asyncio.FIRST_COMPLETED)
                    woken.cancel()
                    if dead.done():
                        raise self.weight_loader.engine.process.death()
        finally:
            dead.cancel()
        return self.grants.popleft() if self.grants else None

    # ---- a local batch -------------------------------------------------------------------------------------

    async def _local_batch(self, grant: Grant) -> None:
        """Generates all of `grant`, and what moves here meanwhile; returns when the last token is there.
        Scores may still be pending."""
        begun = works(grant)
        try:
            if self._goes_back(grant):
                await self._pull(back_to=grant.weight_id)
            self.state.grant(grant.weight_id, len(begun))
        except SlotGone as gone:
            return self._not_loaded(grant, gone)
        except WrongState as refusal:
            for work in begun:
                self._lost(work, str(refusal))
            return None
        finally:
            if grant.parts:
                self.weight_loader.let_go()
        self.tokens = self.overflowed = 0
        with self.context.trace.span(
            "generate", batch_id=grant.batch_id, weight_id=grant.weight_id, step=grant.weight_step
        ) as fields:
            fields |= {"trajectories": len(begun), "evaluation": grant.evaluation}
            await (
                self._interruptible(begun)
                if self.interrupts and not grant.evaluation
                else self.batch.run(begun)
            )
            fields["tokens"] = self.tokens
        if begun and self.overflowed >= len(begun):
            raise self._overflow(f"all {len(begun)} responses of a local batch")
        self.lost_batches_in_a_row = (
            0 if self.tokens or self.batch.moved_away else self.lost_batches_in_a_row + 1
        )
        if self.lost_batches_in_a_row == MAX_LOST_BATCHES_IN_A_ROW:
            raise LaminarError(
                f"rollout {self.context.index} lost all trajectories of {MAX_LOST_BATCHES_IN_A_ROW} "
                f"local batches in a row: see its log and {self.weight_loader.engine.log}"
            )
        return None

    async def _interruptible(self, begun: list[Work]) -> None:
        """A local batch into which newer weights come as soon as they are there."""
        batch, watch = asyncio.create_task(self.batch.run(begun)), asyncio.create_task(self._interrupt())
        try:
            await asyncio.wait((batch, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()  # a pull that failed
            await batch
            async with self.pulling:  # weights that are on their way into the engine get there
                watch.cancel()
        finally:
            for task in (batch, watch):
                task.cancel()
            await asyncio.gather(batch, watch, return_exceptions=True)

    async def _interrupt(self) -> None:
        """Whenever there are newer weights: everything stands still, they are pulled, everything goes on."""
        while True:
            self.wake.clear()
            if self._newer_weights():
                async with self.pulling:
                    with self.context.trace.span("wait", what="interruption"):
                        await self.batch.pause()
                    await self._pull(interrupted=True)
                    self.batch.resume()
            else:
                await self.wake.wait()

    def _ended(self, work: Work, reason: str) -> None:
        """A trajectory has its last token, or is lost."""
        if reason:
            if first_not_finite(work.partial.logprobs) is not None:
                self._count_overflow(work)
            self._lost(work, reason)
            return
        done = trajectory(work, self.context.index)
        self.tokens += len(done.response_tokens)
        self.ended.append((time.monotonic(), len(done.response_tokens)))
        self.context.channel.send(Generated(done, work.evaluation))
        task = asyncio.create_task(self._score(work.evaluation, work.group, done))
        self.scoring.add(task)
        task.add_done_callback(self._scored)

    def _count_overflow(self, work: Work) -> None:
        """See `batch.objection`."""
        key = (work.evaluation, work.trajectory_id)
        self.overflowed += 1
        self.overflows[key] += 1
        if self.overflows[key] >= MOST_OVERFLOWS:
            raise self._overflow(
                f"{MOST_OVERFLOWS} responses to one prompt (trajectory {work.trajectory_id})"
            )

    def _overflow(self, what: str) -> LaminarError:
        engine = self.weight_loader.engine
        return LaminarError(
            f"{engine.name} gave log-probs that are not finite for {what}, with the trainer's weights of id "
            f"{self.state.weight_id} bit "
            f"for bit, which are finite: {OVERFLOW_CURE}; see {engine.log}"
        )

    async def _score(self, evaluation: str, group: PromptGroup, trajectory: Trajectory) -> None:
        tokens = trajectory.response_tokens
        score = await self.pool.score(group.prompt, self.decoder.text(tokens), group.row, tokens)
        self.context.trace.record("score", score.t0, score.t1, trajectory_id=trajectory.trajectory_id)
        self.context.channel.send(
            Scored(
                trajectory.trajectory_id,
                trajectory.attempt,
                score.reward,
                score.parts,
                score.error,
                score.t1,
                evaluation,
            )
        )

    def _scored(self, task: asyncio.Task) -> None:
        self.scoring.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.leaving.done():
            # no reward worker can be started any more: the replica cannot go on
            self.leaving.set_exception(task.exception())

    def _lost(self, work: Work, reason: str) -> None:
        logger.warning("trajectory %d (attempt %d) is lost: %s", work.trajectory_id, work.attempt, reason)
        self.context.channel.send(Lost(work.trajectory_id, work.attempt, reason, work.evaluation))
