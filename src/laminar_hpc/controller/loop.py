"""The controller's loop: receive or tick, decide by the policies, one transaction, then send.

    rollouts --Generated, Scored--> [tracker] --choose--> Batch --> trainer --StepDone--> version + 1
    trainer --NewWeightId--> id; relays --RelayHas--> WeightsAvailable --> rollouts pull
    rollouts --RequestWork--> [admission] --> Grant

    waits                  for                               bounded by
    trainer (TakeBatch)    groups that admission.choose      cluster.batch_timeout_seconds; it says why once
                           takes                             a second
    replica (RequestWork)  quota of admission.quota          the next weights, which the trainer makes from
                                                             what is there
    end of a run           Goodbye of all                    cluster.stop_timeout_seconds

One thread. Handlers only change state and fill the outbox; `turn` commits, then acknowledges and sends.
Nothing is sent before its transaction commits, which also holds how far each worker's stream was taken.
controller/fleet/handlers.py says who takes which message.
"""

import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.check import Derived
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.archiving import Archiving
from laminar_hpc.controller.continuation import Continuation
from laminar_hpc.controller.fleet.active_replicas import ActiveReplicas
from laminar_hpc.controller.fleet.draining import Draining
from laminar_hpc.controller.fleet.handlers import handlers
from laminar_hpc.controller.fleet.members import Member, Members
from laminar_hpc.controller.fleet.membership import Membership
from laminar_hpc.controller.fleet.replicas import Replicas
from laminar_hpc.controller.fleet.trainer_generation import TrainerGeneration
from laminar_hpc.controller.shared import NUMBERS, Outbox, RunState, Shared
from laminar_hpc.controller.training import Training
from laminar_hpc.controller.trajectories.answers import AnswerRouting
from laminar_hpc.controller.trajectories.dispatcher import Dispatcher
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.controller.trajectories.failover import Failover
from laminar_hpc.controller.trajectories.homes import HomeRouting
from laminar_hpc.controller.trajectories.last_evaluation import LastEvaluation
from laminar_hpc.controller.trajectories.migration import Migration
from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.controller.trajectories.reattachment import Reattachment
from laminar_hpc.controller.trajectories.repacker import Repacker
from laminar_hpc.controller.trajectories.reports import TrajectoryReports
from laminar_hpc.controller.trajectories.scorers import Scorers
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.controller.trajectories.unsaid_words import take_up
from laminar_hpc.controller.weights.probes import Probes
from laminar_hpc.controller.weights.weight_ids import Weights
from laminar_hpc.line.hub import Hub, UnreadableMessage
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.membership import Goodbye, Hello, Ping, Pong, Stop, StopRequest
from laminar_hpc.line.messages.rollouts import Leaving
from laminar_hpc.line.messages.wire import AnyMessage
from laminar_hpc.machine.observability.metrics import MetricsWriter
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.machine.processes import process_is_alive
from laminar_hpc.store import status
from laminar_hpc.store.gone_writers import GoneWriters
from laminar_hpc.store.store import Store

_TICK_SECONDS = 0.1
_SPAN_SECONDS = 0.003  # shorter turns are not traced: there are thousands, and they hold nobody up


class Controller:
    """All state of a run in memory. `relays`: how many the run starts with; `restored_step`: of the newest
    checkpoint, from which it goes on unless the trainers say otherwise; `slots`: the name of the run's
    folder in shared memory; `replay`: the store of another run; `say` prints a line for the user."""

    def __init__(
        self,
        config: RunConfig,
        derived: Derived,
        hub: Hub,
        store: Store,
        tracker: TrajectoryTracker,
        evaluations: Evaluations | None,
        metrics: MetricsWriter,
        members: Members,
        relays: int,
        restored_step: int | None,
        slots: str,
        replay: Store | None,
        say: Callable[[str], None],
        trace: Trace,
    ) -> None:
        self.config = config
        self.derived = derived
        self.hub = hub
        self.store = store
        self.tracker = tracker
        self.evaluations = evaluations
        self.metrics = metrics
        self.members = members
        self.trace = trace
        self.state = RunState(restored_step or 0)
        self.outbox = Outbox()
        shared = Shared(config, derived, self.state, members, self.outbox, metrics, say)
        self.request_stop = shared.request_stop
        layers = model_config(config.model.path)["num_hidden_layers"]
        probes = Probes(config.model.dtype, layers, metrics, say)
        self.replicas = Replicas()
        self.pool = PartialResponsePool()
        self.weights = Weights(shared, relays, store, probes)
        self.slots = slots
        self.trainer_generation = TrainerGeneration(shared, store, self.forget_trainers)
        run_id = hub.address.run_id
        patience = config.cluster.join_timeout_seconds + config.cluster.heartbeat_timeout_seconds
        self.gone = GoneWriters(store.run_dir, shared.roles_apart, patience, time.monotonic())
        self.membership = Membership(
            shared,
            self.weights,
            run_id,
            store,
            self.trainer_generation,
            self.forget,
            self.came,
            slots,
            self.gone.is_gone,
        )
        first = store.get("restore_epoch", 0) * NUMBERS
        self.migration = Migration(shared, tracker, self.replicas, self.pool, self.weights.steps, first)
        self.repacker = Repacker(shared, tracker, self.replicas, self.weights, self.migration)
        self.failover = Failover(shared, tracker, self.replicas, self.weights, self.pool, self.migration)
        self.answers = AnswerRouting(shared, tracker, self.pool, self.migration)
        self.homes = HomeRouting(shared, tracker, self.replicas, self.pool)
        self.draining = Draining(shared, tracker, self.replicas, self.pool, self.migration, self.failover)
        self.continuation = Continuation(store, self.state, evaluations)
        self.last_evaluation = LastEvaluation(shared, evaluations)
        awaited, last_seen = set[int](), 0.0
        if shared.roles_apart:
            self.continuation.recall(derived.rollout_ranks)
            awaited, last_seen = tracker.keep_owners(), status.last_seen(Path(config.run_dir))
        self.active_replicas = ActiveReplicas(shared, self.replicas, awaited)
        self.dispatcher = Dispatcher(
            shared,
            tracker,
            evaluations,
            self.replicas,
            self.weights,
            self.failover,
            probes,
            self.active_replicas,
            first,
        )
        self.scorers = Scorers(shared, tracker, self.replicas)
        self.reports = TrajectoryReports(
            shared, tracker, evaluations, self.pool, self.failover, self.scorers, self.homes
        )
        self.archiving = None if replay else Archiving(shared, store, self.gone)
        self.training = Training(
            shared,
            tracker,
            evaluations,
            self.weights,
            store,
            replay,
            self.continuation,
            self.active_replicas,
            self.archiving,
        )
        if shared.roles_apart:
            take_up(Path(config.run_dir), store, tracker, self.pool, self.reports)
        self.reattachment = Reattachment(
            shared, store, tracker, self.replicas, self.failover, awaited, self.replica_lost, last_seen
        )
        self.handlers = handlers(self)
        hub.announce(store.store_id, store.received())

    # ---- one turn ------------------------------------------------------------------------------------------

    def turn(self) -> None:
        arrived = self.hub.poll(0.0 if self.dispatcher.take_more() else _TICK_SECONDS)
        self.store.assure()  # it may have stood still while it listened
        self.store.look()
        self.members.listened_until(self.hub.heard_until)
        begun = time.time()
        try:
            for identity, message in arrived:
                self.handle(identity, message)
            self.tick()
            decided = time.time()
            self.continuation.note()
            self.store.note_received(self.hub.received())
            self.store.commit()
        except BaseException as error:
            self.outbox.turn_failed()  # nothing of it was acknowledged
            with suppress(sqlite3.DatabaseError):
                self.store.roll_back()
            if type(error) is sqlite3.DatabaseError:  # neither a full disk nor a mistake in a statement
                text = f"{self.store.path} was damaged while the run used it ({error})"
                self.store.suspect()
                raise LaminarError(f"{text}; it is made again from memory: go on with resume=auto") from None
            raise
        committed = time.time()
        for identity in self.members.take_left():
            self.hub.end(identity)
        self.hub.committed()
        self.send_all()
        if decided - begun > _SPAN_SECONDS:
            self.trace.record("decide", begun, decided, messages=len(arrived))
        if committed - decided > _SPAN_SECONDS:
            self.trace.record("commit", decided, committed)

    def send_all(self) -> None:
        for identity, message in self.outbox.take():
            self.hub.send(identity, message)

    def handle(self, identity: str, message: AnyMessage | UnreadableMessage) -> None:
        if isinstance(message, UnreadableMessage):
            self.membership.refuse(identity, message.reason)
        elif isinstance(message, Hello):
            self.membership.on_hello(identity, message)
        elif isinstance(message, StopRequest):
            (self.trainer_generation.ask_to_leave if message.trainers_only else self.request_stop)(
                message.reason
            )
        elif (member := self.members.of(identity)) is None:
            self.membership.on_stranger(identity, message)
        else:
            member.last_seen = time.monotonic()
            handler = self.handlers[member.hello.role].get(type(message))
            if handler is None:
                return self.membership.refuse(
                    identity, f"a {member.hello.role} sends no {type(message).__name__}"
                )
            handler(member, message)
            self.failover.place_orphans()
        return None

    def tick(self) -> None:
        self.membership.remove_dead()
        if self.state.ending:
            return
        now = time.monotonic()
        if self.reattachment.tick(now):
            self.continuation.finish()
        self.trainer_generation.tick(now)
        self.weights.update_chains()
        self.training.answer_trainer()
        self.last_evaluation.tick(now)
        self.scorers.assign()
        self.homes.let_go()
        self.dispatcher.dispatch()
        self.migration.call_off_late(now)
        self.draining.move_away()
        self.failover.place_orphans()
        self.repacker.tick(now)
        self.reports.show_progress()
        if self.archiving:
            self.archiving.tick()

    # ---- what concerns several parts -----------------------------------------------------------------------

    def on_ping(self, member: Member, ping: Ping) -> None:
        if ping.load is not None:
            self.replicas.reported(member.hello.index, ping.load)
            self.failover.reported(member.hello.index)
        if ping.progress is not None and member.hello.role == "trainer":
            self.trainer_generation.on_progress(member, ping.progress)
        self.outbox.send(member, Pong())

    def on_goodbye(self, member: Member, goodbye: Goodbye) -> None:
        self.membership.on_goodbye(member, goodbye)
        if member.hello.role == "rollout":
            self.gone.ended(member.hello.index)

    def on_leaving(self, member: Member, leaving: Leaving) -> None:
        self.draining.on_leaving(member, leaving)
        self.homes.replica_lost(member.hello.index)
        self.dispatcher.replica_lost(member.hello.index)

    def on_relay_has(self, member: Member, has: RelayHas) -> None:
        if self.weights.relay_has(member, has):
            self.repacker.consolidate_soon()

    def forget(self, member: Member) -> None:
        """What a lost rollout had in hand goes to others; a lost relay's neighbours are joined."""
        role, index = member.hello.role, member.hello.index
        if role == "relay" and self.members.at("relay", index) is None:
            self.weights.relay_lost(index)
        if role == "rollout":
            self.replica_lost(index)
            self.answers.replica_lost(member)
            self.gone.away(index, time.monotonic())
            if member.hello.machine == self.members.machine and not process_is_alive(member.hello.pid):
                self.gone.ended(index)

    def came(self, member: Member) -> None:
        """A worker that was no member."""
        leads = (member.hello.role, member.hello.index) == ("trainer", 0)
        if leads and member.identity != self.state.trainer_generation:
            self.continuation.other_trainers()
        if member.hello.role == "rollout":
            self.active_replicas.joined(member.hello.index)
            self.gone.came(member.hello.index)
        self.reattachment.joined(member)

    def replica_lost(self, index: int) -> None:
        """What it had in hand goes to others."""
        self.replicas.forget(index)
        self.active_replicas.lost(index)
        self.dispatcher.replica_lost(index)
        self.homes.replica_lost(index)
        trajectories = self.failover.replica_lost(index)
        self.scorers.replica_lost(index)
        if self.evaluations:
            self.evaluations.replica_lost(index)
        if trajectories:
            self.metrics.write("regranted", replica=index, trajectories=trajectories, reason="replica gone")

    def forget_trainers(self) -> None:
        """The trainers have gone, and others are to come; rollouts and relays keep what they have."""
        self.training.trainers_ended()
        self.weights.trainers_ended()

    def tell_all_to_leave(self, reason: str) -> None:
        self.state.ending = True
        for member in self.members.by_place.values():
            self.outbox.send(member, Stop(reason))
