"""One replica with its engine, its weights and its reward workers; role.py runs it.

    start the engine from model.path (unverified) | wait for the first slot
    forever: a newer slot is there -> pull, verify, WeightsOpened
                                      (refresh=interrupt: also in the middle of a local batch)
             RequestWork           -> wait for a Grant, or for newer weights (then pull and ask again)
             Grant                 -> all its requests at once; as each ends its response goes into a payload
                                      file, then Generated; scores go out behind and delay nothing
             Grant with parts      -> the same, of trajectories whose replica has died; on their weights,
                                      which are pulled from an older slot

What is allowed when stands in state.py, which weights are served in served_weights.py and how they are
replaced in weight_loader.py, what was granted and has not begun in grants.py, how a local batch is generated
in batch.py and interrupted in interruption.py, what becomes of its trajectories in results.py, how they go to
other replicas in migration.py, when a replica must end in health.py. Waits for: the relay's first slot
(bounded), a Grant (bounded by the controller's heartbeat). Waited for by: the controller, for Generated and
Scored.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from laminar_hpc.config.models import model_config
from laminar_hpc.data.tokens import stop_token_ids
from laminar_hpc.engine.interface import EngineDied, EngineFactory, EngineHangs
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import StopReceived, Terminated
from laminar_hpc.line.messages.data import Message, Sample
from laminar_hpc.line.messages.homes import Ask, LetGo
from laminar_hpc.line.messages.membership import Release, Welcome
from laminar_hpc.line.messages.parking import TakenUp
from laminar_hpc.line.messages.rollouts import (
    Drop,
    EngineHung,
    Grant,
    Holds,
    NotLoaded,
    ScoreOrder,
    WeightsAvailable,
)
from laminar_hpc.policies import refill
from laminar_hpc.rollout.adapter_loader import new_loader
from laminar_hpc.rollout.asking import Asking, asks_ahead
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.episodes import Episodes
from laminar_hpc.rollout.grants import Grants
from laminar_hpc.rollout.health import BatchHealth
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.interruption import Interruptible
from laminar_hpc.rollout.migration import ReplicaMigration
from laminar_hpc.rollout.move_source import HandOver, MoveSource
from laminar_hpc.rollout.payloads import open_payloads
from laminar_hpc.rollout.profiling import EngineProfile
from laminar_hpc.rollout.reporting import UtilizationReporter
from laminar_hpc.rollout.resets import ResetsAhead
from laminar_hpc.rollout.results import Results
from laminar_hpc.rollout.scoring import Scoring
from laminar_hpc.rollout.served_weights import ServedWeights
from laminar_hpc.rollout.shutdown import SETTLE_SECONDS, GracefulShutdown
from laminar_hpc.rollout.state import ReplicaState, WrongState
from laminar_hpc.rollout.versions import HeldVersions, Versions
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.slots import SlotGone, SlotReader

logger = logging.getLogger(__name__)


def new_episodes(context: RoleContext, stop_ids: Sequence[int], hand_over: HandOver) -> Episodes | None:
    """A replica's, where the run's trajectories have several turns."""
    environment = context.config.environment
    if environment.by_url:
        from laminar_hpc.rollout.agents import AgentEpisodes  # aiohttp's server takes a third of a second

        return AgentEpisodes(context, stop_ids, hand_over)
    return Episodes(context, stop_ids, hand_over) if environment.several else None


class RolloutWorker:
    """One replica. `pool`: reward workers of several replicas of one process, which the caller owns."""

    def __init__(
        self, context: RoleContext, new_engine: EngineFactory, pool: RewardPool | None = None
    ) -> None:
        self.context = context
        self.config = context.config
        several = self.config.pipeline.refresh == "versions"
        bound = self.config.pipeline.staleness_max or 0
        self.state = HeldVersions(refill.held(bound)) if several else ReplicaState()
        self.own_pool = pool is None
        self.pool = pool or RewardPool(self.config.reward, self.config.data.prompt_field)
        self.engine_starts = 0
        self.engines = EngineLives(new_engine, self._engine_seed)
        model = Path(self.config.model.path)
        reader = SlotReader(self.config.relay.shm_dir, context.welcome.slots_name)
        probe = probe_sequences(model_config(self.config.model.path)["vocab_size"])
        loader = self.weight_loader = new_loader(reader, probe, context.trace, self.engines, self.config)
        stop_ids = stop_token_ids(model)
        moves = MoveSource(context, self.engines)
        self.episodes = new_episodes(context, stop_ids, moves.hand_over)
        cluster, one_world = context.config.cluster, context.config.role == "all"  # which a full disk ends
        patience = 0.0 if one_world else cluster.join_timeout_seconds
        self.payloads, read = open_payloads(context, patience)
        self.scoring = Scoring(context, self.pool, self._leave, read, self.episodes)
        self.health = BatchHealth(context.index, self.state, self.engines)
        turns = self.episodes.run if self.episodes else None
        self.batch = LocalBatch(
            context, self.engines, self.state, stop_ids, self._ended, moves.hand_over, turns
        )
        self.reporter = UtilizationReporter(self.batch, lambda: self.scoring.pending)
        self.weights = ServedWeights(self.batch, reader, self.weight_loader, self.reporter)
        self.results = Results(context, self.payloads, self.scoring, self.health, self.reporter.finished)
        answers = self.episodes.answers if self.episodes else None
        self.migration = ReplicaMigration(self.batch, moves.mail, answers)
        self.wake = asyncio.Event()  # a grant, newer weights, or the end
        self.shutdown = GracefulShutdown(self.batch, self._leave, self.wake.set, answers)
        self.resets = ResetsAhead(self.episodes.pool if self.episodes else None, self.state)
        self.grants = Grants(self.state, self.weight_loader, self.batch.route_shape, asks_ahead(self.config))
        self.asking = Asking(self.batch, self.grants, self.weights.newest_id)
        self.profile = EngineProfile(context, self.engines)
        self.interrupts = self.config.pipeline.refresh == "interrupt"
        self.interruptible = Interruptible(self.batch, context.trace, self.wake, self.weights)
        self.versions = (
            Versions(self.batch, self.wake, self.weights, loader, self.grants, self.shutdown, self._more)
            if several
            else None
        )
        self.ask_again = False
        self.leaving: asyncio.Future[None] | None = None  # its exception says why

    def _engine_seed(self) -> int:
        """Another seed for each start of an engine: nothing is drawn twice; the same for one run.seed."""
        self.engine_starts += 1
        replica, epoch = self.context.index, self.context.welcome.epoch
        name = f"{self.config.seed}/{replica}/{epoch}/{self.engine_starts}"
        return random.Random(name).randrange(2**31)

    # ---- life ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves until the controller says Stop. Raises LaminarError when the replica cannot go on."""
        loop = asyncio.get_running_loop()
        self.leaving = loop.create_future()

        def deliver(item: Message | Exception) -> None:  # called in the channel's thread
            loop.call_soon_threadsafe(self._arrived, item)

        self.context.channel.subscribe(deliver)
        beside, last_words = (self.reporter.run(), self.shutdown.at_notice()), None
        tasks = [asyncio.create_task(each) for each in beside]
        try:
            await self._guarded(self._start())
            while True:
                await self._guarded(self._turn())
        except StopReceived as stop:
            logger.info("rollout %d leaves: %s", self.context.index, stop.reason)
            half = self.config.cluster.stop_timeout_seconds / 2
            await self.scoring.settle(SETTLE_SECONDS if self.shutdown.begun else half)
            if self.shutdown.begun:  # on a busy machine the engine's end takes long
                last_words = asyncio.create_task(asyncio.to_thread(self._last_words))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.own_pool:
                await self.pool.close()
            if self.episodes:
                await self.episodes.close()
            self.weight_loader.let_go()
            await self.engines.current.stop()
            await (last_words or asyncio.to_thread(self.payloads.close))

    def _last_words(self) -> None:
        self.payloads.close()  # responses are said when they are written
        self.context.channel.close()

    def _arrived(self, item: Message | Exception) -> None:
        if isinstance(item, Terminated | Release):
            self.shutdown.begin()
        elif isinstance(item, Exception):
            self._leave(item)
        elif isinstance(item, Grant):
            self._granted(item)
            self.wake.set()
        elif isinstance(item, WeightsAvailable):
            self.weights.announced(item.weight_id)
            self.wake.set()
        elif isinstance(item, TakenUp):
            self.batch.taking_up.arrived(item)
        elif isinstance(item, ScoreOrder):
            self.scoring.begin_ordered(item)
        elif isinstance(item, Welcome):
            self._joined_anew()
            if self.shutdown.begun:
                self.shutdown.say()
        elif isinstance(item, Ask | LetGo):
            if self.episodes:
                self.episodes.homes.arrived(item)
        elif isinstance(item, Drop):
            self._drop({(sample.trajectory_id, sample.attempt) for sample in item.samples})
        else:
            self.migration.arrived(item)

    # ---- another session with the controller ---------------------------------------------------------------

    def _joined_anew(self) -> None:
        """The controller had taken this replica for dead, or is another one: it learns what is here, and is
        asked for work again. Of evaluations it has begun the shares anew."""
        self.grants.drop_evaluations()
        self._drop_works(lambda trajectory: bool(trajectory.evaluation))
        trajectories = [*self.batch.trajectories.values(), *self.grants.trajectories]
        generating = [
            Sample(trajectory.trajectory_id, trajectory.attempt)
            for trajectory in trajectories
            if not trajectory.is_dropped()
        ]
        served, newest = self.state.weight_id, self.grants.newest_batch
        moves = sorted(self.migration.imported)
        self.context.channel.send(Holds(served, newest, generating, self.scoring.samples, moves))
        self.batch.tell_all()
        if self.versions:
            self.versions.forget()
        self.ask_again = True
        self.wake.set()

    def _drop(self, attempts: set[tuple[int, int]]) -> None:
        self.grants.drop(attempts)
        self._drop_works(lambda trajectory: (trajectory.trajectory_id, trajectory.attempt) in attempts)

    def _drop_works(self, gone: Callable[[TrajectoryInFlight], bool]) -> None:
        self.grants.drop_beginning(gone)
        self.batch.drop(gone)

    def _leave(self, error: BaseException) -> None:
        if self.leaving is not None and not self.leaving.done():
            self.leaving.set_exception(error)

    async def _guarded(self, life: Coroutine[Any, Any, None]) -> None:
        """Runs `life` until it ends. Raises if the engine dies, at Stop, or if the controller is silent."""
        assert self.leaving is not None
        task = asyncio.create_task(life)
        try:
            await asyncio.wait((task, self.leaving), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.leaving.result()
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ---- start ---------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Engine and reward workers start while the trainer loads and publishes; then the first weights."""
        t0 = time.monotonic()  # the clock may be set meanwhile
        with self.context.trace.span("load", what="engine"):
            pool = [self.pool.start()] if self.own_pool else []
            pool += [self.episodes.start()] if self.episodes else []
            await asyncio.gather(*pool, self.engines.start(Path(self.config.model.path), None))
        logger.info("engine %d answered after %.1f s", self.context.index, time.monotonic() - t0)
        with self.context.trace.span("wait", what="first weights"):
            await self.weights.until_first(t0)

    # ---- one turn: weights, then work ----------------------------------------------------------------------

    async def _turn(self) -> None:
        if self.shutdown.begun:  # nothing more is begun; what was granted and not begun others get
            await asyncio.Event().wait()
        if not self.grants:  # else there is work already, on older weights perhaps
            if self.state.weight_id is None:  # a relay that has started anew may hold none yet
                await self.weights.until_first(time.monotonic())
            if self.state.weight_id is None or self.weights.newer():
                await self._pull()
        if not self.grants:  # one that came during the pull is its work
            self.ask_again = False
            assert self.state.weight_id is not None
            if self.versions:
                self.versions.ask()
            else:
                self.asking.ask(self.state.weight_id)
        grant = await self._next_grant()
        if grant is not None:
            await self._local_batch(grant)

    async def _pull(self, back_to: int | None = None) -> None:
        if self.versions:
            await self.versions.retire()
        await self.weights.pull(back_to=back_to)

    # ---- work ----------------------------------------------------------------------------------------------

    def _granted(self, grant: Grant) -> None:
        try:
            self.asking.granted()
            self.grants.add(grant)
        except SlotGone as gone:
            self._not_loaded(grant, gone)

    def _not_loaded(self, grant: Grant, gone: SlotGone) -> None:
        self.context.channel.send(NotLoaded(grant.batch_id, str(gone)))
        self.ask_again = True

    async def _next_grant(self) -> Grant | None:
        """A grant, or None when newer weights are due first or it must ask again. Raises EngineDied."""
        death, woken = asyncio.create_task(self.engines.current.died()), None
        try:
            with self.context.trace.span("wait", what="work"):
                while not (self.grants or self.weights.due() or self.ask_again or self.shutdown.begun):
                    self.wake.clear()
                    woken = asyncio.create_task(self.wake.wait())
                    await asyncio.wait((woken, death), return_when=asyncio.FIRST_COMPLETED)
                    if death.done():
                        raise death.result()
        finally:
            death.cancel()
            if woken is not None:
                woken.cancel()
        return self.grants.take() if self.grants and not self.shutdown.begun else None

    async def _begin(self, grant: Grant) -> list[TrajectoryInFlight]:
        """The grant's trajectories, when its weights are there and it is admitted; none where it is not."""
        begun = self.grants.begin(grant)
        try:
            if begun and self.grants.loads(grant):
                await self._pull(grant.weight_id)
            if begun:
                self.state.grant(grant.weight_id, len(begun))
            return begun
        except (SlotGone, WrongState) as refusal:
            if self.versions:  # others are generated here meanwhile
                self.results.hand_over(begun, str(refusal))
            elif isinstance(refusal, SlotGone):
                self._not_loaded(grant, refusal)
            else:
                for trajectory in begun:
                    self.results.lost(trajectory, str(refusal))
        finally:
            self.grants.begun(grant)
        return []

    async def _more(self, grant: Grant) -> list[TrajectoryInFlight]:
        """As `_begin`, into a batch that is under way."""
        begun = await self._begin(grant)
        if begun:
            self.health.more(len(begun), self.batch.moved_away)
            self.resets.told(grant.ahead, len(begun))
            await self.profile.before(grant.weight_step)
        return begun

    async def _local_batch(self, grant: Grant) -> None:
        """Generates all of `grant`, and what moves here meanwhile; returns when the last token is there.
        Scores may still be pending."""
        begun = await self._begin(grant)
        if not begun:
            return None
        self.health.begin()
        self.resets.told(grant.ahead, len(begun))
        with self.context.trace.span(
            "generate", batch_id=grant.batch_id, weight_id=grant.weight_id, step=grant.weight_step
        ) as fields:
            fields |= {"trajectories": len(begun), "evaluation": grant.evaluation}
            interruptible = self.interrupts and not grant.evaluation
            try:
                await self.profile.before(grant.weight_step)
                beside = self.versions or (self.interruptible if interruptible else self.batch)
                await beside.run(begun)
            except (EngineHangs, EngineDied) as error:
                return await self._engine_fails(error)
            fields["tokens"] = self.health.tokens
        self.asking.drained()
        self.health.end(len(begun), self.batch.moved_away)
        return None

    def _ended(self, trajectory: TrajectoryInFlight, outcome: Outcome) -> None:
        self.results.ended(trajectory, outcome)
        self.asking.ended()
        self.resets.look()

    async def _engine_fails(self, error: EngineHangs | EngineDied) -> None:
        """The engine is ended; the next turn starts another with its pull. What was generated goes on
        elsewhere from what is known of it. With an engine that has died the replica ends, unless tools are
        called in it, whose results would be lost, or environments are in it."""
        episodes = self.episodes
        if isinstance(error, EngineDied) and not (episodes and episodes.for_others):
            raise error
        logger.error("%s", error)
        self.context.channel.send(EngineHung(str(error)))
        self.results.hand_over(self.batch.left, str(error))
        if episodes:
            episodes.answers.go_on()
        self.state.abandoned()
        await self.weight_loader.replace()
        self.health.hung(error)
