"""The controller's parts, in layers. Each layer is made once, in this order, and knows only those above it.

    Shared      configuration, state of the run, members, ways out (shared.py)
    Tables      what the controller knows of trajectories and replicas
    Flow        trajectories to replicas and back: weights, grants, moves, scores
    Protocols   members, trainers, archive
    Controller  the loop (loop.py)

Parts that have to hear of a lost replica, or of trainers that have gone, are told one after the other.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.models import model_config
from laminar_hpc.controller.fleet.active_replicas import ActiveReplicas
from laminar_hpc.controller.fleet.autoscaling import Autoscaling
from laminar_hpc.controller.fleet.draining import Draining
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.fleet.membership import Membership
from laminar_hpc.controller.fleet.replica_starter import starter_of
from laminar_hpc.controller.fleet.trainer_generation import TrainerGeneration
from laminar_hpc.controller.shared import NUMBERS, HearsOfLosses
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.takeover import Continuation, Reattachment
from laminar_hpc.controller.training import Training
from laminar_hpc.controller.trajectories.answers import AnswerRouting
from laminar_hpc.controller.trajectories.dispatcher import Dispatcher
from laminar_hpc.controller.trajectories.failover import Failover
from laminar_hpc.controller.trajectories.homes import HomeRouting
from laminar_hpc.controller.trajectories.last_evaluation import LastEvaluation
from laminar_hpc.controller.trajectories.migration import Migration
from laminar_hpc.controller.trajectories.parking import Parking
from laminar_hpc.controller.trajectories.repacker import Repacker
from laminar_hpc.controller.trajectories.reports import TrajectoryReports
from laminar_hpc.controller.trajectories.scorers import Scorers
from laminar_hpc.controller.trajectories.unsaid_words import take_up
from laminar_hpc.controller.weights.probes import Probes
from laminar_hpc.controller.weights.weight_ids import Weights
from laminar_hpc.line.messages.membership import Ping, Pong
from laminar_hpc.store import status
from laminar_hpc.store.archiving import Archiving
from laminar_hpc.store.gone_writers import GoneWriters


@dataclass(frozen=True, kw_only=True)
class Flow(Tables):
    """The parts that bring trajectories to replicas and back. `awaited`, `last_seen`: see Reattachment."""

    awaited: set[int]
    last_seen: float
    weights: Weights
    continuation: Continuation
    migration: Migration
    parking: Parking
    failover: Failover
    answers: AnswerRouting
    homes: HomeRouting
    active_replicas: ActiveReplicas
    dispatcher: Dispatcher
    scorers: Scorers
    reports: TrajectoryReports

    @property
    def told_of_losses(self) -> list[HearsOfLosses]:
        """All to which it matters that a replica is lost, in the order in which they hear of it."""
        told: list[HearsOfLosses] = [
            self.replicas,
            self.active_replicas,
            self.dispatcher,
            self.homes,
            self.failover,
        ]
        told += [self.scorers, *([self.evaluations] if self.evaluations else []), self.answers]
        return told


@dataclass(frozen=True, kw_only=True)
class Protocols(Flow):
    """The parts for members, trainers and the archive."""

    gone: GoneWriters
    repacker: Repacker
    draining: Draining
    last_evaluation: LastEvaluation
    archiving: Archiving | None
    training: Training
    trainer_generation: TrainerGeneration
    reattachment: Reattachment
    membership: Membership
    autoscaling: Autoscaling | None

    def on_ping(self, member: Member, ping: Ping) -> None:
        """Answers a sign of life, and takes what it carries."""
        if ping.load is not None:
            self.replicas.reported(member.hello.index, ping.load)
            self.failover.reported(member.hello.index)
        if ping.progress is not None and member.hello.role == "trainer":
            self.trainer_generation.on_progress(member, ping.progress)
        self.outbox.send(member, Pong())


def make_flow(t: Tables, relays: int) -> Flow:
    """Makes the parts over `t`. `relays`: how many the run starts with."""
    layers = model_config(t.config.model.path)["num_hidden_layers"]
    probes = Probes(t.config.model.dtype, layers, t.metrics, t.say)
    weights = Weights(t, relays, t.store, probes)
    first = t.store.get("restore_epoch", 0) * NUMBERS
    migration = Migration(t, weights.steps, first)
    failover = Failover(t, weights, migration)
    continuation, awaited, last_seen = Continuation(t.store, t.state, t.evaluations), set[int](), 0.0
    if t.roles_apart:
        continuation.recall(t.derived.rollout_ranks)
        awaited, last_seen = t.tracker.keep_owners(), status.last_seen(Path(t.config.run_dir))
    active_replicas = ActiveReplicas(t, t.replicas, awaited)
    homes = HomeRouting(t)
    scorers = Scorers(t)
    return Flow(
        **vars(t),
        awaited=awaited,
        last_seen=last_seen,
        weights=weights,
        continuation=continuation,
        migration=migration,
        parking=Parking(t, migration),
        failover=failover,
        answers=AnswerRouting(t, migration),
        homes=homes,
        active_replicas=active_replicas,
        dispatcher=Dispatcher(t, weights, failover, probes, active_replicas, first),
        scorers=scorers,
        reports=TrajectoryReports(t, failover, scorers, homes),
    )


def make_protocols(f: Flow, run_id: str) -> Protocols:
    """Makes the parts over `f`, which has the words of rollouts that no controller has heard."""
    store, tracker, cluster = f.store, f.tracker, f.config.cluster
    patience = cluster.join_timeout_seconds + cluster.heartbeat_timeout_seconds
    gone = GoneWriters(store.run_dir, f.roles_apart, patience, time.monotonic())
    archiving = None if f.replay else Archiving(f.config, store, gone, f.metrics, f.say)
    training = Training(f, f.weights, f.continuation, f.active_replicas, archiving)
    trainer_generation = TrainerGeneration(f, store, [training, f.weights])
    if f.roles_apart:
        take_up(Path(f.config.run_dir), store, tracker, f.pool, f.reports)
    reattachment = Reattachment(f, f.failover, f.awaited, f.told_of_losses, f.last_seen)
    scales = f.config.rollout.scales
    autoscaling = Autoscaling(f, training, f.active_replicas, starter_of(f.config)) if scales else None
    return Protocols(
        **vars(f),
        gone=gone,
        repacker=Repacker(f, f.weights, f.migration),
        draining=Draining(f, f.migration, f.failover, f.parking, [f.homes, f.dispatcher]),
        last_evaluation=LastEvaluation(f),
        archiving=archiving,
        training=training,
        trainer_generation=trainer_generation,
        reattachment=reattachment,
        membership=Membership(f, run_id, trainer_generation, gone, reattachment),
        autoscaling=autoscaling,
    )
