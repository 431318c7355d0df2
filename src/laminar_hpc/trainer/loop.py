"""The trainer role: take a batch, train on it, publish the weights, checkpoint; until the steps are done or
the controller says leave.

    controller --Batch--> inbox --broadcast--> learner --weights--> publisher --> relays
        ^--StepDone(metrics)--'                   '--> checkpointer (every N steps, and the last) --> disk

Waits for: the next batch, at most cluster.batch_timeout_seconds; a checkpoint only until it is copied, and at
the end until it is written. Is waited for by: nobody, but for the data that it consumes. Every rank of the
trainer world runs this; rank 0 owns step, stop and checkpoint.
"""

import time
from contextlib import closing
from typing import NamedTuple

import torch.distributed as dist

from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import replayed_routes
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.training import Checkpointed, Restored, StepDone, TrainerDone
from laminar_hpc.policies.metrics import merged
from laminar_hpc.trainer.algorithms.trial import try_own
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.checkpointing.reports import Saved
from laminar_hpc.trainer.inbox import BatchInbox, Unreadable
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.profiling import StepsProfile, speaks_for_its_stage
from laminar_hpc.trainer.progress import Progress
from laminar_hpc.trainer.publishing.publisher import Publisher
from laminar_hpc.trainer.step.guard import GuardReport
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.world import init_trainer_world

_READS = 4  # batches of one step whose responses cannot all be read, then the disk is to be looked at


class _NoPublisher:
    """In a replay nobody takes the weights."""

    def publish(self, step: int) -> None: ...
    def fence(self) -> None: ...
    def close(self) -> None: ...


def run(context: RoleContext) -> None:
    """The whole life of a trainer rank. Raises LaminarError for whatever ends the run, StopReceived when the
    controller ends it."""
    config, progress = context.config, Progress(context.channel)
    try_own(config.algorithm)
    with context.trace.span("load"):
        init_trainer_world(context)
        progress.advance()
        policy = MegatronPolicy(config)
        learner = Learner(config, policy, progress.advance)
        checkpointer = Checkpointer(
            context.run_dir,
            policy,
            learner,
            context.welcome,
            lambda saved: _tell(context, saved),
            context.channel.when_failed,
        )
        progress.advance()
        restored, passed_over = checkpointer.restore()
        if dist.get_rank() == 0:
            context.channel.send(Restored(restored, passed_over))
        inbox = BatchInbox(context, progress, replayed_routes(config, model_config(config.model.path)))
        publisher = _NoPublisher() if config.source.startswith("replay:") else Publisher(context, policy)
    with closing(checkpointer):
        step = _steps(context, policy, learner, checkpointer, inbox, publisher, progress, restored)
    progress.enter("publish")
    publisher.close()
    if dist.get_rank() == 0:
        context.channel.send(TrainerDone(step))
        context.channel.flush()  # this process ends, and only the controller can end the run
    dist.destroy_process_group()


def _steps(
    context: RoleContext,
    policy: MegatronPolicy,
    learner: Learner,
    checkpointer: Checkpointer,
    inbox: BatchInbox,
    publisher: Publisher | _NoPublisher,
    progress: Progress,
    restored: int | None,
) -> int:
    """All steps of this life, and their checkpoints; the last one is on the disk when it returns its step."""
    config, step, saved = context.config, restored or 0, restored
    progress.enter("publish")
    _publish(context, policy, publisher, step)

    steps = config.observability.profile if speaks_for_its_stage() else 0
    profile = StepsProfile(context.run_dir / "profile", f"trainer{context.index}", step, steps)
    ended = time.monotonic()
    while step < config.steps:
        with profile.step(step):
            done = _train(context, inbox, learner, publisher, progress, step)
        if done is None:
            break
        checkpointer.poll()
        step += 1
        progress.enter("publish")
        _publish(context, policy, publisher, step)
        if step % config.checkpoint.every == 0 or step == config.steps:
            progress.enter("checkpoint")
            with context.trace.span("checkpoint", step=step):
                checkpointer.begin(step)
            saved = step
        elif step == (restored or 0) + 1:  # now all processes of the machine have the memory that they need
            checkpointer.prepare()
        done.metrics["train_seconds"] = done.ended - ended - done.metrics["wait_seconds"]
        done.metrics["seconds"] = time.monotonic() - ended
        ended = time.monotonic()
        if not inbox.report(done.told(step - 1)):
            break

    profile.close()
    progress.enter("checkpoint")
    with context.trace.span("checkpoint", step=step):
        if saved != step:
            checkpointer.begin(step)
        checkpointer.finish()
    return step


class _Step(NamedTuple):
    """What is told of a step: its metrics, each trajectory's log-prob mismatch (see Learner.mismatches), what
    the guard has done, and when its last update ended (monotonic, as the clock may be set)."""

    metrics: dict[str, float]
    mismatches: dict[int, tuple[float, int]]
    guarded: GuardReport
    ended: float

    def told(self, step: int) -> StepDone:
        """As the controller hears it."""
        by = self.guarded
        return StepDone(step, self.metrics, self.mismatches, by.left_out, by.skip, by.stop)


def _train(
    context: RoleContext,
    inbox: BatchInbox,
    learner: Learner,
    publisher: Publisher | _NoPublisher,
    progress: Progress,
    step: int,
) -> _Step | None:
    """One step, on the whole batch or, with pipeline.consumption=stream, mini-batch after mini-batch as they
    come. None when the run is to end here."""
    config, trace = context.config, context.trace

    def fence() -> None:
        progress.enter("publish")
        publisher.fence()
        progress.enter("train")

    minibatches = config.algorithm.minibatches_per_step
    parts = minibatches if config.pipeline.consumption == "stream" else 1
    mismatches: dict[int, tuple[float, int]] = {}
    of_parts, wait_seconds, guarded = list[dict[str, float]](), 0.0, GuardReport()
    for part in range(parts):
        lost: Unreadable | None = None
        for again in range(_READS):
            asked = time.monotonic()
            with trace.span("wait", step=step):
                batch = inbox.take(step, part, lost)
            if batch is None:
                break
            wait_seconds += time.monotonic() - asked
            try:
                with trace.span("train", step=step):
                    of_parts.append(learner.train(batch, step, fence, minibatches // parts, part))
                break
            except Unreadable as error:  # before the first update; another batch follows
                lost = error
                if again + 1 == _READS:
                    raise
        if batch is None:
            break
        mismatches |= learner.mismatches
        guarded = guarded.and_then(learner.guarded)
    if not of_parts:
        return None
    metrics = merged(of_parts) | {"wait_seconds": wait_seconds}
    return _Step(metrics, mismatches, guarded, time.monotonic())


def _publish(
    context: RoleContext, policy: MegatronPolicy, publisher: Publisher | _NoPublisher, step: int
) -> None:
    policy.check_finite(step)
    with context.trace.span("publish", step=step):
        publisher.publish(step)


def _tell(context: RoleContext, saved: Saved) -> None:
    context.channel.send(
        Checkpointed(saved.step, str(saved.path), saved.seconds, saved.state_hash, saved.stalled)
    )
