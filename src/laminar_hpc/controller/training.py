"""The trainer's side: it says where it starts, asks for the batch of a step, says when the step is done,
checkpoints, and is done.

Restored -> store, tracker, weights and evaluations go back to that step
TakeBatch -> `answer_trainer`, each tick -> Batch, Leave, or once a second NotYet with the reason
StepDone -> Continue or Leave

What trainers ask again, because this controller or the one before could not answer, is answered again
(controller/takeover.py).
"""

import dataclasses
import logging
import time
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.teachers import teacher_of, teachers_of
from laminar_hpc.controller.fleet.active_replicas import ActiveReplicas
from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.shown_samples import ShownSamples
from laminar_hpc.controller.tables import Tables
from laminar_hpc.controller.takeover import Continuation
from laminar_hpc.controller.weights.weight_ids import Weights
from laminar_hpc.line.endings import SAME_VERSION
from laminar_hpc.line.messages.training import (
    Batch,
    BatchGroup,
    Checkpointed,
    Continue,
    Leave,
    NotYet,
    Restored,
    StepDone,
    TakeBatch,
    TrainerDone,
)
from laminar_hpc.machine.observability import console
from laminar_hpc.policies import admission
from laminar_hpc.store import checkpoints, put_back
from laminar_hpc.store.archive import files
from laminar_hpc.store.archiving import Archiving
from laminar_hpc.store.payload.writer import PayloadWriter
from laminar_hpc.store.store import Store

log = logging.getLogger(__name__)
_NOT_YET_SECONDS = 1.0
AFTER_DIVERGENCE = (
    "A checkpoint is written, but what went wrong may be in it: look at an earlier one too. Lower "
    "optimizer.lr, or look at logprob_mismatch in metrics.jsonl; resume=auto goes on with a new band, "
    "guard.enabled=false without a guard (docs/algorithms.md)"
)


class Training:
    """`replay`: the store of another run, which then has all batches."""

    def __init__(
        self,
        tables: Tables,
        weights: Weights,
        continuation: Continuation,
        active_replicas: ActiveReplicas,
        archiving: Archiving | None,
    ) -> None:
        self._shared = tables
        self._config = tables.config
        self._state = tables.state
        self._tracker = tables.tracker
        self._evaluations = tables.evaluations
        self._weights = weights
        self._store = tables.store
        self._replay = tables.replay
        self._continuation = continuation
        self._active_replicas = active_replicas
        self._archiving = archiving
        self._writer: PayloadWriter | None = None  # of a replay's steps that come from an archive
        config = tables.config
        self._samples = ShownSamples(Path(config.model.path), config.observability.show_samples, tables.say)
        # it is due, or done, since an earlier controller
        self._evaluated_before = bool(self._state.trainer_generation)
        self._request: TakeBatch | None = None
        self._wait_reason = ""
        self._last_not_yet = self._last_step_time = 0.0
        self._step_seconds: list[float] = []
        self.newest_record: dict = {}  # of a step, after the first one

    @property
    def waits_for(self) -> str:
        """Why the trainer has no batch; empty when it does not wait."""
        return self._wait_reason if self._request is not None else ""

    # ---- where it starts -----------------------------------------------------------------------------------

    def on_restored(self, member: Member, restored: Restored) -> None:
        """The same for a fresh run, a resumed one, and trainers that replace others in a live run."""
        state, step = self._state, restored.step or 0
        if restored.step is None and (seen := checkpoints.steps(Path(self._config.run_dir))):
            raise LaminarError(
                f"{member.name} sees no checkpoint in {self._config.run_dir}, where the controller sees that "
                f"of step {seen[-1]}: run_dir must be on a file system that all trainers share"
            )
        state.trainer_generation = member.identity
        self._request = None
        state.trainer_step = step
        state.groups_taken = 0
        state.trainer_done = False
        self._continuation.taken_back()
        if self._archiving:
            self._archiving.put_back(step)
        groups = self._tracker.restore(step)
        self._shared.staleness.trainers_start(step)
        first_id = self._weights.restored(step)
        if self._evaluations:
            self._evaluations.restore(step, first_id)
        if self._evaluations and restored.step is None and not self._evaluated_before:
            self._evaluations.add("before", 0, self._active_replicas.size)
            self._evaluated_before = True
        self._last_step_time = 0.0
        self._say_where(restored, groups)

    def trainers_ended(self) -> None:
        """What the trainers had asked for lapses; the next trainer generation says where it is."""
        self._state.trainer_generation = ""
        self._request = None

    def _say_where(self, restored: Restored, groups: int) -> None:
        say, steps = self._shared.say, self._config.steps
        self._shared.metrics.write("restored", restored_step=restored.step, groups=groups)
        for text in restored.passed_over:
            say(console.line("warning", text))
        if restored.step is not None:
            say(console.line("set-up", f"going on from the checkpoint of step {restored.step}"))
            if restored.step >= steps:
                text = f"all {steps} steps are trained: only the last evaluation is done now"
                say(console.line("set-up", text))

    def _check_started(self, member: Member, what: str) -> None:
        if member.identity != self._state.trainer_generation:
            raise LaminarError(f"{member.name} {what} and has not said where it starts; {SAME_VERSION}")

    # ---- batches -------------------------------------------------------------------------------------------

    def on_take_batch(self, member: Member, request: TakeBatch) -> None:
        self._check_started(member, f"asks for step {request.step}")
        if request.unreadable:
            self._take_back(request)
        if self._sent_again(member, request):
            return
        if request.step != self._state.trainer_step:
            raise LaminarError(
                f"the trainer asks for step {request.step}, the run is "
                f"at step {self._state.trainer_step}; go on with resume=auto"
            )
        if self._last_step_time == 0.0:
            self._last_step_time = time.monotonic()
            if not self._state.steps_done:  # else it was before this controller came
                self._shared.say(console.setup_line("the trainer is ready", self._state.seconds))
        self._request = request
        self._wait_reason = "it has just asked"
        self._last_not_yet = time.monotonic()

    def _take_back(self, request: TakeBatch) -> None:
        """Of a batch that cannot be read: those responses are generated again, its other groups wait."""
        if self._replay:
            raise LaminarError(request.why)
        groups = self._continuation.sent_before(request.step, request.part)
        lost = self._tracker.unreadable(request.unreadable, groups or [])
        if not lost:  # asked another time
            return
        self._continuation.taken_back()
        self._state.groups_taken -= len(groups or [])
        for sample in lost:
            fields = {"trajectory_id": sample.trajectory_id, "attempt": sample.attempt}
            self._shared.metrics.write("lost", **fields, reason="its response cannot be read")
        text = f"{len(lost)} responses cannot be read and are generated again; the first: {request.why}"
        self._shared.say(console.line("warning", text))

    def _sent_again(self, member: Member, request: TakeBatch) -> bool:
        """The trainer did not get the answer: the batch goes out as it was."""
        groups = self._continuation.sent_before(request.step, request.part)
        if groups is None:
            return False
        if request.step == self._state.trainer_step:  # else its step is done by now
            self._send_batch(member, request, self._store.rows.batch(groups))
        return True

    def _send_batch(self, trainer: Member, request: TakeBatch, groups: list[BatchGroup]) -> None:
        samples = self._config.algorithm.samples_per_prompt
        replay = self._replay
        run_dir = str(replay.run_dir) if replay and request.step >= replay.archived_steps else ""
        self._name_teachers(groups)
        self._shared.outbox.send(trainer, Batch(request.step, groups, samples, run_dir, request.part))

    def _name_teachers(self, groups: list[BatchGroup]) -> None:
        names = list(teachers_of(self._config.teacher))
        for group in groups if len(names) > 1 else ():
            row = self._tracker.groups.row(self._store.rows.prompt_index(group.group_id))
            group.teacher = teacher_of(row, names, f"the row of group {group.group_id}")

    def answer_trainer(self) -> None:
        trainer = self._shared.members.at("trainer")
        if self._request is None or trainer is None:
            return
        request, algorithm = self._request, self._config.algorithm
        step = request.step
        stream = self._config.pipeline.consumption == "stream"
        size = algorithm.prompts_per_step // (algorithm.minibatches_per_step if stream else 1)
        if (reason := self._why_they_leave) and not self._state.groups_taken:
            self._request = None
            self._shared.outbox.send(trainer, Leave(reason))
            return
        groups, reason = self._replayed(self._replay, step) if self._replay else self._take(request, size)
        if groups:
            self._request = None
            self._state.groups_taken = (request.part + 1) * size
            self._send_batch(trainer, request, groups)
        elif time.monotonic() - self._last_not_yet > _NOT_YET_SECONDS:
            self._last_not_yet = time.monotonic()
            self._wait_reason = reason
            self._shared.outbox.send(trainer, NotYet(step, reason))

    def _replayed(self, replay: Store, step: int) -> tuple[list[BatchGroup], str]:
        groups = replay.rows.batch(replay.rows.consumed_groups(step))
        if not groups and step < replay.archived_steps:
            if self._writer is None:
                self._writer = PayloadWriter(self._store.run_dir, put_back.WRITER)
            groups = put_back.batch_of(self._writer, files.path_of(replay.run_dir, step + 1))
        if not groups:
            raise LaminarError(f"{self._config.source} holds no batch of step {step}; set steps={step}")
        return groups, ""

    def _take(self, request: TakeBatch, size: int) -> tuple[list[BatchGroup], str]:
        """`size` groups, which count as consumed from here on; else none, and
        the reason to wait."""
        whole, staleness = self._config.algorithm.prompts_per_step, self._shared.staleness
        step, taken, live = request.step, self._state.groups_taken, self._tracker.groups.live
        choice = admission.choose(step, live, whole, staleness.bounds, taken, size)
        if not choice.group_ids:
            staleness.trainer_waits(time.monotonic(), step, live, size, self._tracker.counted)
            return [], choice.reason
        groups = sorted(choice.group_ids)
        self._continuation.sent(step, request.part, groups)
        batch = self._tracker.consume(groups, step)
        staleness.trainer_takes(time.monotonic(), step, live, whole - taken - size)
        return batch, ""

    # ---- steps ---------------------------------------------------------------------------------------------

    def on_step_done(self, member: Member, done: StepDone) -> None:
        self._check_started(member, f"has done step {done.step}")
        if done.step < self._state.trainer_step:  # it did not get the answer
            return self._answer_step(member, done)
        self._state.trainer_step = done.step + 1
        self._state.groups_taken = 0
        self._shared.staleness.step_done(time.monotonic(), done.step + 1)
        self._record(done)
        if done.diverged:
            self._shared.fail(f"{done.diverged}. {AFTER_DIVERGENCE}", "training diverges")
        store = self._replay or self._store
        self._samples.show(done.step, store.rows, store.run_dir)
        step, every = self._state.trainer_step, self._config.evaluation.every
        if self._evaluations and every and step % every == 0 and step < self._config.steps:
            self._evaluations.add("step", step, 1)
        return self._answer_step(member, done)

    def _answer_step(self, member: Member, done: StepDone) -> None:
        reason = self._why_they_leave
        self._shared.outbox.send(member, Leave(reason) if reason else Continue(done.step))

    @property
    def _why_they_leave(self) -> str:
        return self._state.stopping or self._state.trainers_leave

    def _record(self, done: StepDone) -> None:
        """In the metrics, and as a line for the user."""
        state, config, say, now = self._state, self._config, self._shared.say, time.monotonic()
        seconds = now - self._last_step_time if self._last_step_time else done.metrics.get("seconds", 0.0)
        self._last_step_time = now
        fields: dict[str, object] = {**done.metrics, "step": state.trainer_step, "seconds": seconds}
        rows = (self._replay or self._store).rows
        fields["accuracy_by_weight_id"] = rows.accuracy_by_weight_id(done.step)
        if self._replay is None:
            fields |= dataclasses.asdict(self._tracker.counts.take()) | self._shared.staleness.figures()
            self._store.rows.note_mismatches(done.mismatches)
            self._store.rows.note_left_out(done.mismatches, done.left_out)
        if state.steps_done:  # the first step holds the start-up of the engines
            self._step_seconds.append(seconds)
        state.steps_done += 1
        record = self._shared.metrics.write("step", **fields)
        self.newest_record = record
        left = console.eta(self._step_seconds, config.steps - state.trainer_step)
        say(console.step_line(record, config.steps, left))
        if skipped := done.metrics.get("skipped_updates"):
            skipped_max = config.optimizer.max_skipped_updates
            say(console.skipped_line(state.trainer_step, round(skipped), skipped_max))
        if skipped := done.metrics.get("guard_skipped_updates"):
            say(console.guard_line(state.trainer_step, round(skipped), done.skipped))

    def on_checkpointed(self, _: Member, saved: Checkpointed) -> None:
        fields = {name: getattr(saved, name) for name in ("step", "path", "seconds", "stalled", "state_hash")}
        self._shared.metrics.write("checkpoint", **fields)
        if self._archiving:
            self._archiving.checkpointed()
        self._store.suspect()
        log.info("checkpoint of step %d in %.1f s: %s", saved.step, saved.seconds, saved.path)

    def on_trainer_done(self, _: Member, done: TrainerDone) -> None:
        state = self._state
        leave = state.trainers_leave and not state.stopping and done.step < self._config.steps
        if state.trainer_done or leave:
            return
        state.trainer_done = True
        if state.stopping or self._evaluations is None:
            state.finished = True
        elif not any(evaluation.label == "after" for evaluation in self._evaluations.queue):
            self._evaluations.add("after", self._config.steps, self._active_replicas.size)
