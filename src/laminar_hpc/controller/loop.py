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

One thread. Handlers only change state and fill the outbox; `turn` commits, then sends. Nothing is sent before
its transaction commits.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from laminar_hpc import messages as m
from laminar_hpc.cluster import terminal
from laminar_hpc.cluster.channel import SAME_VERSION
from laminar_hpc.cluster.hub import Hub, UnreadableMessage
from laminar_hpc.cluster.processes import oom_kills, process_is_alive
from laminar_hpc.config.check import Derived
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.evaluations import Evaluations
from laminar_hpc.controller.members import Member, Members
from laminar_hpc.controller.migration import Migration
from laminar_hpc.controller.probes import Probes
from laminar_hpc.controller.rewards import RewardErrors
from laminar_hpc.controller.store import Store
from laminar_hpc.controller.tracker import Group, TrajectoryTracker
from laminar_hpc.controller.weights import Weights
from laminar_hpc.observability import console
from laminar_hpc.observability.metrics import MetricsWriter
from laminar_hpc.observability.shown_samples import ShownSamples
from laminar_hpc.observability.trace import Trace
from laminar_hpc.policies import admission, filtering
from laminar_hpc.policies.rounds import Rounds
from laminar_hpc.policies.sampling import worth_a_batch
from laminar_hpc.pretrained import recorded_name

log = logging.getLogger(__name__)
_TICK_SECONDS = 0.1
_MEMORY_CURES = {
    "trainer": "give the container more, lower trainer.tokens_per_microbatch or use more trainer ranks",
    "rollout": "give the container more or lower rollout.kv_cache_tokens",
    "relay": "give the container more or lower relay.slots",
}
_SPAN_SECONDS = 0.003  # shorter turns are not traced: there are thousands, and they hold nobody up
_NOT_YET_SECONDS = 1.0
_PROGRESS_SECONDS = 5.0


class Controller:
    """All state of a run in memory. `say` prints a line for the user."""

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
        restored_step: int,
        replay: Store | None,
        say: Callable[[str], None],
        trace: Trace,
    ) -> None:
        self.config, self.derived, self.hub, self.store, self.tracker, self.evaluations = (
            config,
            derived,
            hub,
            store,
            tracker,
            evaluations,
        )
        self.metrics, self.members, self.say, self.replay = metrics, members, say, replay
        self.restored_step, self.trace = restored_step, trace
        self.trainer_step = max(0, restored_step)
        self.weights = Weights(self, relays)
        self.open_weights: dict[int, int] = {}  # replica -> the id that it serves
        self.waiting: dict[int, m.RequestWork] = {}
        self.granted: dict[int, int] = {}  # replica -> the newest batch of its present life
        self.loads: dict[int, m.ReplicaLoad] = {}  # by replica, from its pings
        self.take: m.TakeBatch | None = None
        self.taken = 0  # groups that the trainer has had of its present step
        self.take_reason = ""  # why it has no answer yet
        self.last_not_yet = self.last_step_time = self.last_progress = 0.0
        self.step_seconds: list[float] = []
        self.seen_steps = 0
        self.pull_seconds = 0.0  # of the newest pull
        self.probes = Probes(
            config.model.dtype, model_config(config.model.path)["num_hidden_layers"], metrics, say
        )
        self.samples = ShownSamples(Path(config.model.path), config.observability.show_samples, say)
        self.outbox: list[tuple[str, m.Message]] = []
        self.trainers_meet: m.TrainersMeet | None = None
        self.batches = 0
        self.stopping = ""
        self.failure = ""  # why a run that stops in order has failed all the same
        self.trainer_done = False
        self.finished = False
        self.ending = False  # all workers have been told to leave
        self.started = time.time()
        self.separate = config.role != "all"
        self.oom_kills = oom_kills()
        self.reward_errors = RewardErrors(config, say)
        self.migration = Migration(self)
        self.rounds = Rounds(derived.rollout_ranks) if config.pipeline.refresh == "barrier" else None
        self.handlers = self._handlers()

    def _handlers(self) -> dict[str, dict[type, Callable]]:
        """By the sender's role, who takes which message: handler(member, message)."""
        everyone = {m.Goodbye: self.on_Goodbye, m.Failure: self.on_Failure}
        weights, moves = self.weights, (m.Reserved, m.MoveReady, m.Imported, m.MoveFailed)
        return {
            "trainer": everyone
            | {
                m.TrainersMeet: self.on_TrainersMeet,
                m.TakeBatch: self.on_TakeBatch,
                m.StepDone: self.on_StepDone,
                m.Checkpointed: self.on_Checkpointed,
                m.TrainerDone: self.on_TrainerDone,
                m.LaneSenders: weights.on_LaneSenders,
                m.NewWeightId: weights.on_NewWeightId,
                m.Published: weights.on_Published,
                m.StoreOpened: weights.on_StoreOpened,
                m.LinkDown: weights.on_LinkDown,
            },
            "relay": everyone
            | {
                m.StoreOpened: weights.on_StoreOpened,
                m.LinkDown: weights.on_LinkDown,
                m.RelayHas: weights.on_RelayHas,
            },
            "rollout": everyone
            | {kind: self.migration.heard for kind in moves}
            | {
                m.WeightsOpened: self.on_WeightsOpened,
                m.RequestWork: self.on_RequestWork,
                m.NotLoaded: self.on_NotLoaded,
                m.Generated: self.on_Generated,
                m.Scored: self.on_Scored,
                m.Lost: self.on_Lost,
                m.Increment: self.on_Increment,
            },
        }

    # ---- one turn ------------------------------------------------------------------------------------------

    def turn(self) -> None:
        arrived = self.hub.poll(_TICK_SECONDS)
        begun = time.time()
        for identity, message in arrived:
            self.handle(identity, message)
        self.tick()
        decided = time.time()
        self.store.commit()
        committed = time.time()
        for identity, message in self.outbox:
            self.hub.send(identity, message)
        self.outbox.clear()
        if decided - begun > _SPAN_SECONDS:
            self.trace.record("decide", begun, decided, messages=len(arrived))
        if committed - decided > _SPAN_SECONDS:
            self.trace.record("commit", decided, committed)

    def send(self, member: Member | None, message: m.Message) -> None:
        if member is not None:
            self.outbox.append((member.identity, message))

    def handle(self, identity: str, message: m.AnyMessage | UnreadableMessage) -> None:
        if isinstance(message, UnreadableMessage):
            return self.on_refused(identity, message.reason)
        if isinstance(message, m.Hello):
            return self.on_hello(identity, message)
        if isinstance(message, m.StopRequest):
            return self.request_stop(message.reason)
        member = self.members.of(identity)
        if member is None:
            return self.on_stranger(identity, message)
        member.heard = time.monotonic()
        if isinstance(message, m.Ping):
            if message.load is not None:
                self.loads[member.hello.index] = message.load
                self.migration.loaded(member.hello.index, message.load)
            self.send(member, m.Pong())
        elif (handler := self.handlers[member.hello.role].get(type(message))) is not None:
            handler(member, message)
        else:
            self.on_refused(identity, f"a {member.hello.role} sends no {type(message).__name__}")
        return None

    def on_refused(self, identity: str, reason: str) -> None:
        """The sender has the run's key, so it is a bug or another version. What it wanted to say is lost, and
        whoever waits for it would time out: the sender ends with this reason, and so does the run, unless it
        can do without it."""
        member = self.members.of(identity)
        text = f"a message from {member.name if member else identity} was refused: {reason}; {SAME_VERSION}"
        log.error(text)
        self.outbox.append((identity, m.Failure(text)))
        if member is None or self.ending:
            return
        if not self.separate or member.hello.role == "trainer":
            raise LaminarError(text)
        self.members.leave(member)
        self.forget(member)
        if not terminal.shared():
            self.say(f"{text}; the others go on")

    def tick(self) -> None:
        for member in self.members.dead():
            self.on_death(
                member,
                "has died"
                if member.hello.machine == self.members.machine
                else "has been silent for too long or has died",
            )
        if not self.ending:
            self.weights.form()
            self.answer_trainer()
            self.dispatch()
            self.migration.tick(time.monotonic())
            self.show_progress()

    # ---- membership ----------------------------------------------------------------------------------------

    def on_hello(self, identity: str, hello: m.Hello) -> None:
        if hello.role not in self.handlers or not identity.startswith(f"{hello.role}:{hello.index}:"):
            return self.on_refused(identity, f"{hello.role} {hello.index} is no place in this run")
        if rival := self.members.rival(hello):
            where = f"pid {rival.hello.pid} on {rival.hello.machine}"
            text = f"{rival.name} is in this run already ({where}): start another run_dir, or set first_index"
            self.outbox.append((identity, m.Failure(text)))
            return
        earlier = self.members.join(identity, hello)
        if earlier and earlier.identity != identity:
            self.forget(earlier)
        if hello.role == "relay":
            self.weights.chain_of(hello.index).came(hello.index, time.monotonic())
            self.weights.gone_from(hello.machine)
        log.info("%s %d joined (pid %d on %s)", hello.role, hello.index, hello.pid, hello.machine)
        state = (self.hub.address.run_id, self.restored_step, self.trainer_step, self.weights.newest[0])
        self.outbox.append((identity, m.Welcome(*state, str(recorded_name(self.config.model.path) or ""))))
        if hello.role == "trainer" and self.trainers_meet:
            self.outbox.append((identity, self.trainers_meet))
        if hello.role == "rollout" and hello.machine in self.weights.of_machine:
            self.outbox.append((identity, m.WeightsAvailable(*self.weights.of_machine[hello.machine])))

    def on_TrainersMeet(self, member: Member, place: m.TrainersMeet) -> None:
        self.trainers_meet = place  # also for those who join later
        for trainer in self.members.all("trainer"):
            if trainer is not member:
                self.send(trainer, place)

    def on_stranger(self, identity: str, message: m.AnyMessage) -> None:
        """Who was taken for dead and is heard again may come back, unless another process has taken its
        place."""
        log.warning("%s from %s, which is no member any more, was refused", type(message).__name__, identity)
        if self.ending or not self.separate or not isinstance(message, m.Ping):
            return
        role, index, *_ = [*identity.split(":"), ""]
        if role not in self.handlers or not index.isdecimal():
            return self.on_refused(identity, "it is no role and index")
        replaced = self.members.at(role, int(index)) is not None
        self.outbox.append(
            (identity, m.Stop(f"another {role} {index} has taken its place") if replaced else m.Rejoin())
        )

    def on_Goodbye(self, member: Member, _: m.Goodbye) -> None:
        self.members.leave(member)
        self.forget(member)

    def on_Failure(self, member: Member, failure: m.Failure) -> None:
        self.members.leave(member)
        if member.hello.role in ("rollout", "relay") and self.separate:
            log.error("%s failed: %s", member.name, failure.text)
            if not terminal.shared():
                self.say(f"{member.name} failed: {failure.text}; the others go on")
            self.forget(member)
        elif not self.ending:
            raise LaminarError("a worker has failed")  # it has said itself why

    def on_death(self, member: Member, how: str) -> None:
        self.members.leave(member)
        self.forget(member)
        if self.ending or (self.trainer_done and member.hello.role == "trainer"):
            return
        if member.hello.machine == self.members.machine and oom_kills() > self.oom_kills:
            how = (
                "was killed for want of memory: "
                f"{_MEMORY_CURES.get(member.hello.role, 'give the container more')}"
            )
        log_file = f"logs/{member.hello.role}{member.hello.index}.log in the run directory"
        text = f"{member.name} (pid {member.hello.pid} on {member.hello.machine}) {how}; see {log_file}"
        told = (
            terminal.shared()
            and member.hello.machine == self.members.machine
            and not process_is_alive(member.hello.pid)
        )
        if told and member.hello.role == "trainer":
            raise LaminarError("a worker has failed")
        if not self.separate or member.hello.role == "trainer":
            raise LaminarError(f"{text}, then go on with the same command and resume=auto")
        log.error(text)
        if not told:
            self.say(f"{text}; the others go on")

    def forget(self, member: Member) -> None:
        """What a rollout had in hand goes to others; a relay's neighbours are joined."""
        if member.hello.role == "relay" and self.members.at("relay", member.hello.index) is None:
            self.weights.chain_of(member.hello.index).gone(member.hello.index)
        if member.hello.role != "rollout":
            return
        replica = member.hello.index
        self.waiting.pop(replica, None)
        self.granted.pop(replica, None)
        self.open_weights.pop(replica, None)
        self.loads.pop(replica, None)
        if self.rounds:
            self.rounds.gone([replica])
        lost = self.migration.replica_gone(replica)
        if self.evaluations:
            self.evaluations.replica_gone(replica)
        if lost:
            self.metrics.write("regranted", replica=replica, trajectories=lost, reason="replica gone")

    def request_stop(self, reason: str) -> None:
        if not self.stopping:
            self.stopping = reason
            self.say(
                console.line(
                    "stopping", f"{reason}: finishing step {self.trainer_step + 1}, then a checkpoint"
                )
            )
            if not self.members.at("trainer") or self.trainer_done:
                self.finished = True

    # ---- weights -------------------------------------------------------------------------------------------

    def on_WeightsOpened(self, member: Member, opened: m.WeightsOpened) -> None:
        replica = member.hello.index
        if replica not in self.open_weights:
            self.say(
                console.setup_line(
                    f"replica {replica} serves weight id {opened.weight_id}", time.time() - self.started
                )
            )
        self.open_weights[replica], self.pull_seconds = opened.weight_id, opened.seconds
        self.migration.rescuer.opened(replica, opened.weight_id)
        self.metrics.write(
            "pull",
            replica=replica,
            weight_id=opened.weight_id,
            step=opened.weight_step,
            seconds=opened.seconds,
            parts=opened.parts,
        )
        self.probes.scored(opened.weight_id, opened.weight_step, f"rollout{replica}", opened.probe_logprobs)

    # ---- rollouts ------------------------------------------------------------------------------------------

    def on_RequestWork(self, member: Member, request: m.RequestWork) -> None:
        replica = member.hello.index
        self.open_weights[replica] = request.weight_id  # known anew of a replica that was taken for dead
        if request.seen >= self.granted.get(replica, -1):
            self.waiting[replica] = request

    def on_NotLoaded(self, member: Member, message: m.NotLoaded) -> None:
        self.migration.not_loaded(member, message)

    def grant(self, member: Member, grant: m.Grant) -> None:
        """`grant` has the number `batches`."""
        self.batches += 1
        self.granted[member.hello.index] = grant.batch_id
        self.waiting.pop(member.hello.index, None)
        self.send(member, grant)

    def dispatch(self) -> None:
        """Local batches for idle replicas: what dead ones left behind, evaluations, then what admission
        allows."""
        if self.evaluations:
            self.evaluations.reset_stranded(set(self.open_weights.values()))
        self.migration.rescuer.dispatch()
        for replica, request in list(self.waiting.items()):
            member = self.members.at("rollout", replica)
            step = self.weights.steps.get(request.weight_id)
            # a step that has begun shall end
            if member is None or step is None or (self.stopping and not self.taken):
                continue
            if self.weights.of_machine.get(member.hello.machine, (-1, -1))[0] > request.weight_id:
                del self.waiting[replica]  # it has been told of newer weights: it pulls and asks again
                continue
            grant = (
                self.evaluations.grant(replica, request.weight_id, step, self.batches, time.time())
                if self.evaluations
                else None
            )
            grant = grant or self.training_grant(replica, request.weight_id, step)
            if grant is not None:
                self.grant(member, grant)

    def training_grant(self, replica: int, weight_id: int, step: int) -> m.Grant | None:
        if self.trainer_done or (
            self.rounds and not self.rounds.may_begin(replica, self.idle(), self.weights.newest[0])
        ):
            return None
        size, bound = self.config.algorithm.prompts_per_step, self.config.pipeline.max_staleness
        quota = admission.quota(step, self.tracker.counted, size, self.config.steps, bound)
        waiting, scoring = self.tracker.ready(replica)
        if not worth_a_batch(
            quota + waiting, self.derived.local_batch_groups, scoring and self.tracker.may_change
        ):
            return None

        def may_go_on(group: admission.GroupView) -> bool:
            return admission.may_go_on(
                group, step, self.trainer_step, self.tracker.views(), size, bound, self.taken
            )

        if self.rounds:
            self.rounds.took(replica)
        groups = self.tracker.draw(
            self.derived.local_batch_groups, quota, replica, weight_id, step, time.time(), may_go_on
        )
        sampling = self.config.sampling
        return (
            m.Grant(self.batches, weight_id, step, groups, sampling.temperature, sampling.max_response_tokens)
            if groups
            else None
        )

    def idle(self) -> dict[int, int]:
        """The weight id that each replica without work serves."""
        return {replica: request.weight_id for replica, request in self.waiting.items()}

    def on_Generated(self, member: Member, generated: m.Generated) -> None:
        if generated.evaluation and self.evaluations:
            self.evaluations.generated(generated)
        else:
            if self.tracker.generated(generated.trajectory, self.trainer_step):
                self.migration.ended(generated.trajectory.trajectory_id)

    def on_Increment(self, member: Member, increment: m.Increment) -> None:
        if self.tracker.counts_as(increment.trajectory_id, increment.attempt):
            self.migration.pool.add(increment)

    def on_Scored(self, member: Member, scored: m.Scored) -> None:
        self.watch_reward(scored)
        if scored.evaluation and self.evaluations:
            evaluation = self.evaluations.scored(scored)
            if evaluation is not None:
                for result in self.evaluations.results(evaluation, time.time()):
                    self.say(console.evaluation_line(self.metrics.write("evaluation", **result)))
                self.finished = self.finished or (self.trainer_done and not self.evaluations.queue)
        else:
            group = self.tracker.scored(
                scored.trajectory_id, scored.attempt, scored.reward, scored.parts, scored.error, scored.time
            )
            if group is not None and not group.finished:
                self.on_filtered(group)

    def watch_reward(self, scored: m.Scored) -> None:
        """A whole batch of failures ends the run: at once when nothing was trained yet, else with a
        checkpoint."""
        if scored.error:
            log.warning("reward of trajectory %d: %s", scored.trajectory_id, scored.error)
            if not self.reward_errors.count:
                where = {"trajectory_id": scored.trajectory_id, "evaluation": scored.evaluation}
                self.metrics.write("reward_error", text=scored.error, **where)
        why = self.reward_errors.take(scored)
        if why and not self.seen_steps:
            raise LaminarError(why)
        if why and not self.failure:
            self.failure = why
            self.request_stop("every reward fails")

    def on_filtered(self, group: Group) -> None:
        """A group without advantage was given up. Ends the run, with a checkpoint, when nothing but such
        groups has come for long."""
        reason = filtering.reason([s.reward for s in group.samples.values()])
        self.metrics.write(
            "given_up", group_id=group.group_id, prompt_index=group.prompt_index, reason=reason
        )
        if not self.failure and filtering.exhausted(
            self.tracker.filtered_in_a_row, self.config.algorithm.prompts_per_step
        ):
            self.failure = (
                f"the last {self.tracker.filtered_in_a_row} groups were all filtered, the last because "
                f"{reason}: nothing can be learned "
                "from these prompts now; take easier or harder ones, check reward.function, or set "
                "algorithm.zero_variance=keep"
            )
            self.request_stop("every group is filtered")

    def on_Lost(self, member: Member, lost: m.Lost) -> None:
        log.warning("trajectory %d, attempt %d, was lost: %s", lost.trajectory_id, lost.attempt, lost.reason)
        if lost.evaluation and self.evaluations:
            self.evaluations.lost(lost)
        else:
            if self.tracker.lost(lost.trajectory_id, lost.attempt):
                self.tracker.counts.tokens_discarded += self.migration.ended(lost.trajectory_id)
            self.metrics.write(
                "lost", trajectory_id=lost.trajectory_id, attempt=lost.attempt, reason=lost.reason
            )

    def show_progress(self) -> None:
        """Now and then, how far a long evaluation is."""
        for evaluation in self.evaluations.queue if self.evaluations else []:
            if (
                evaluation.scored
                and time.time() - max(evaluation.started, self.last_progress) > _PROGRESS_SECONDS
            ):
                self.last_progress = time.time()
                self.say(
                    console.evaluation_progress(
                        evaluation.name, evaluation.label, evaluation.scored, evaluation.responses
                    )
                )

    # ---- the trainer ---------------------------------------------------------------------------------------

    def on_TakeBatch(self, member: Member, take: m.TakeBatch) -> None:
        if take.step != self.trainer_step:
            raise LaminarError(
                f"the trainer asks for step {take.step}, the run is "
                f"at step {self.trainer_step}; go on with resume=auto"
            )
        if self.last_step_time == 0.0:
            self.last_step_time = time.time()
            self.say(console.setup_line("the trainer is ready", time.time() - self.started))
        self.take, self.take_reason, self.last_not_yet = take, "it has just asked", time.time()

    def answer_trainer(self) -> None:
        """Gives the waiting trainer its batch, the word to leave, or once a second the reason why it
        waits."""
        trainer = self.members.at("trainer")
        if self.take is None or trainer is None:
            return
        step, whole = self.take.step, self.config.algorithm.prompts_per_step
        parts = (
            self.config.algorithm.minibatches_per_step if self.config.pipeline.consumption == "stream" else 1
        )
        size = whole // parts
        if self.stopping and not self.taken:
            self.take = None
            self.send(trainer, m.Leave(self.stopping))
            return
        if self.replay is not None:
            payloads = self.replay.payloads(self.replay.consumed_groups(step))
            if not payloads:
                raise LaminarError(f"{self.config.source} holds no batch of step {step}; set steps={step}")
            choice = admission.Choice([-1])
        else:
            ready = self.tracker.ready_groups
            # no need to look at them all, turn after turn
            few = admission.Choice([], f"{ready} of {size} groups are finished")
            choice = few if ready < size else self.choose(step, whole, size)
            payloads = self.tracker.consume(sorted(choice.group_ids), step) if choice.group_ids else []
        if choice.group_ids:
            self.take, self.taken = None, self.taken + size
            self.send(
                trainer,
                m.StoredBatch(
                    step, [msgspec.Raw(p) for p in payloads], self.config.algorithm.samples_per_prompt
                ),
            )
        elif time.time() - self.last_not_yet > _NOT_YET_SECONDS:
            self.last_not_yet, self.take_reason = time.time(), choice.reason
            self.send(trainer, m.NotYet(step, choice.reason))

    def choose(self, step: int, whole: int, size: int) -> admission.Choice:
        return admission.choose(
            step, self.tracker.views(), whole, self.config.pipeline.max_staleness, self.taken, size
        )

    def on_StepDone(self, member: Member, done: m.StepDone) -> None:
        now = time.time()
        self.trainer_step = done.step + 1
        fields = {**done.metrics, "step": self.trainer_step, "seconds": now - self.last_step_time}
        if self.replay is None:
            fields |= dataclasses.asdict(self.tracker.take_counts())
            self.store.note_gaps(done.gaps)
        self.last_step_time, self.taken = now, 0
        if self.seen_steps:  # the first step holds the start-up of the engines
            self.step_seconds.append(fields["seconds"])
        self.seen_steps += 1
        record = self.metrics.write("step", **fields)
        left = console.eta(self.step_seconds, self.config.steps - self.trainer_step)
        self.say(console.step_line(record, self.config.steps, left))
        if skipped := done.metrics.get("skipped_updates"):
            self.say(
                console.skipped_line(
                    self.trainer_step, round(skipped), self.config.optimizer.max_skipped_updates
                )
            )
        self.samples.show(done.step, self.replay or self.store)
        every = self.config.evaluation.every
        if (
            self.evaluations
            and every
            and self.trainer_step % every == 0
            and self.trainer_step < self.config.steps
        ):
            self.evaluations.add("step", self.trainer_step, 1)
        self.send(member, m.Leave(self.stopping) if self.stopping else m.Continue())

    def on_Checkpointed(self, member: Member, saved: m.Checkpointed) -> None:
        self.metrics.write(
            "checkpoint", step=saved.step, path=saved.path, seconds=saved.seconds, state_hash=saved.state_hash
        )
        log.info("checkpoint of step %d in %.1f s: %s", saved.step, saved.seconds, saved.path)

    def on_TrainerDone(self, member: Member, done: m.TrainerDone) -> None:
        self.trainer_done = True
        if self.stopping or self.evaluations is None:
            self.finished = True
            return
        self.evaluations.add("after", self.config.steps, self.derived.rollout_ranks)

    # ---- the end -------------------------------------------------------------------------------------------

    def tell_all_to_leave(self, reason: str) -> None:
        self.ending = True
        for member in self.members.by_place.values():
            self.send(member, m.Stop(reason))
