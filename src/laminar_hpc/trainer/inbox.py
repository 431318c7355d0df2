"""The trainer's line to the controller: batches in, finished steps out. Rank 0 talks; the other ranks hear
what it heard.

A batch is a plan: which trajectories, and where their responses are. Each rank reads those that it trains
from the payload files, and all hear of it when one could not. Plans travel inside the trainer world as the
bytes that they have on the wire (msgpack), never pickled. Every wait is bounded.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.routing import RouteShape
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import Message, Sample
from laminar_hpc.line.messages.training import Batch, Continue, Leave, NotYet, StepDone, TakeBatch
from laminar_hpc.line.messages.wire import AnyMessage, decode, encode
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.store.payload.reader import LATE_SECONDS, read, read_routes
from laminar_hpc.store.payload.whole import place_of
from laminar_hpc.trainer.control import all_frames, from_first
from laminar_hpc.trainer.progress import Progress
from laminar_hpc.trainer.step.batch import PlannedMicrobatch, StepBatch, plan_of

log = logging.getLogger(__name__)
# the other ranks wait so much longer than rank 0, so that rank 0's error is the one that is seen
_MARGIN_SECONDS = 60.0
_told = msgspec.msgpack.Decoder(tuple[list[Sample], str, bool])


class Unreadable(LaminarError):
    """Some responses of a batch, of which nothing is trained yet; the same on all ranks."""

    def __init__(self, samples: list[Sample], why: str) -> None:
        super().__init__(why)
        self.samples = samples


class BatchInbox:
    """Collective: every rank of the trainer world makes the same calls in the same order. `routes`: with
    which responses are read; None: without."""

    def __init__(self, context: RoleContext, progress: Progress, routes: RouteShape | None = None) -> None:
        self._progress = progress
        self._channel = context.channel
        self._seconds = context.config.cluster.batch_timeout_seconds
        self._rank = dist.get_rank()
        self._run_dir = context.run_dir
        self._routes = routes

    def take(self, step: int, part: int = 0, lost: Unreadable | None = None) -> StepBatch | None:
        """The batch that turns step `step` into step + 1, or its mini-batch `part`; None when the run is to
        end here, never in the middle of a step. `lost`: what cannot be read of the one before. Raises
        LaminarError after batch_timeout_seconds."""
        request = TakeBatch(step, part, lost.samples, str(lost)) if lost else TakeBatch(step, part)
        answer = self._ask(request, Batch, f"the batch of step {step}")
        if isinstance(answer, Leave):
            log.info("leaving at step %d: %s", step, answer.reason)
            return None
        assert isinstance(answer, Batch)
        run_dir = Path(answer.run_dir) if answer.run_dir else self._run_dir
        return StepBatch(plan_of(answer.groups), lambda wanted: self._read(run_dir, step, wanted))

    def _read(self, run_dir: Path, step: int, wanted: Sequence[PlannedMicrobatch]) -> list[Response]:
        self._progress.enter("wait")
        found, lost, why = list[Response](), list[Sample](), ""
        try:
            found = _checked(run_dir, wanted, LATE_SECONDS, self._routes)
        except LaminarError as error:
            lost, why = _unreadable(run_dir, wanted, self._routes), str(error)
        # where none of many can be read, it is the file system
        said = msgspec.msgpack.encode((lost, why, len(lost) < max(2, len(wanted))))
        frames = all_frames(said if why else b"", self._seconds, f"the responses of step {step}")
        self._progress.enter("train")
        told = [_told.decode(frame) for frame in frames if frame]
        if all(are_some for _, _, are_some in told) and (all_lost := [s for lost, *_ in told for s in lost]):
            raise Unreadable(all_lost, told[0][1])
        if told:
            raise LaminarError(told[0][1])
        return found

    def report(self, done: StepDone) -> bool:
        """Says that a step is in the weights; False when the run is to end here."""
        self._progress.has_trained()
        answer = self._ask(done, Continue, f"the answer to step {done.step}")
        if isinstance(answer, Leave):
            log.info("leaving after step %d: %s", done.step, answer.reason)
        return isinstance(answer, Continue)

    def _ask(self, message: TakeBatch | StepDone, answer: type, what: str) -> AnyMessage:
        self._progress.enter("wait")
        frame = b""
        if self._rank == 0:
            frame = encode(self._request(message, answer, what))
            self._progress.enter("train")  # the others wait for rank 0 alone
        heard = decode(from_first(frame, self._seconds + _MARGIN_SECONDS, what))
        self._progress.enter("train")
        return heard

    def _request(self, message: TakeBatch | StepDone, answer: type, what: str) -> Message:
        """Rank 0: sends, again after a Welcome, and waits for its `answer` or Leave; the
        controller says about once a second why it is not there yet."""
        session = self._channel.sessions
        self._channel.send(message)
        deadline, reason = time.monotonic() + self._seconds, "it has given no reason"
        while (left := deadline - time.monotonic()) > 0:
            heard = self._channel.wait(answer, Leave, NotYet, timeout=left, session=session)
            if isinstance(heard, NotYet):
                if heard.reason != reason:
                    log.info("waiting for %s: %s", what, heard.reason)
                reason = heard.reason
            elif heard is not None and _answers(message, heard):
                return heard
            elif session != self._channel.sessions:
                session = self._channel.sessions
                log.info("asking another time for %s", what)
                self._channel.send(message)
        raise LaminarError(
            f"trainer 0 waited {self._seconds:.0f} s for {what} from the controller ({reason}); "
            "look at the rollouts' logs, or raise cluster.batch_timeout_seconds"
        )


def _checked(
    run_dir: Path, wanted: Sequence[PlannedMicrobatch], late: float, shape: RouteShape | None
) -> list[Response]:
    """The responses, with `shape` with their routes."""
    places = [place_of(planned.record) for planned in wanted]
    found = read(run_dir, places, late)
    for planned, response in zip(wanted, found, strict=True):
        _check(planned, response)
    if shape is None:
        return found
    of_tokens = [(*place, planned.length) for place, planned in zip(places, wanted, strict=True)]
    routes = read_routes(run_dir, of_tokens, shape, late)
    return [replace(response, routed_experts=of) for response, of in zip(found, routes, strict=True)]


def _unreadable(run_dir: Path, wanted: Sequence[PlannedMicrobatch], shape: RouteShape | None) -> list[Sample]:
    lost = []
    for planned in wanted:
        try:
            _checked(run_dir, [planned], 0.0, shape)
        except LaminarError:
            lost.append(Sample(planned.record.trajectory_id, planned.record.attempt))
    return lost


def _check(planned: PlannedMicrobatch, response: Response) -> None:
    record = planned.record
    if response.digest != record.digest or len(response.tokens) != record.length:
        raise LaminarError(
            f"the response of trajectory {record.trajectory_id} has not the digest that it was generated "
            "with: it has changed since; look at the files with laminar audit RUN_DIR"
        )


def _answers(question: TakeBatch | StepDone, heard: Message) -> bool:
    """Else it answers an earlier one, which was asked twice."""
    if isinstance(heard, Batch) and isinstance(question, TakeBatch):
        return (heard.step, heard.part) == (question.step, question.part)
    return heard.step == question.step if isinstance(heard, Continue) else isinstance(heard, Leave)
