"""The trainer's line to the controller: batches in, finished steps out. Rank 0 talks; the other ranks hear
what it heard.

Batches travel inside the trainer world as the bytes that they have on the wire (msgpack), never pickled.
Every wait is bounded.
"""

import logging
import time

import torch.distributed as dist

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.messages.data import Message
from laminar_hpc.messages.digest import is_intact
from laminar_hpc.messages.training import Batch, Continue, Leave, NotYet, StepDone, TakeBatch
from laminar_hpc.messages.wire import AnyMessage, decode, encode
from laminar_hpc.trainer.control import from_first
from laminar_hpc.trainer.progress import Progress

log = logging.getLogger(__name__)
# the other ranks wait so much longer than rank 0, so that rank 0's error is the one that is seen
_MARGIN_SECONDS = 60.0


class Inbox:
    """Collective: every rank of the trainer world makes the same calls in the same order."""

    def __init__(self, context: RoleContext, progress: Progress) -> None:
        self._progress = progress
        self._channel, self._seconds = context.channel, context.config.cluster.batch_timeout_seconds
        self._rank = dist.get_rank()

    def take(self, step: int, part: int = 0) -> Batch | None:
        """The batch that turns step `step` into step + 1, or its mini-batch `part`; None when the run is to
        end here, never in the middle of a step. Raises LaminarError after batch_timeout_seconds, and for a
        response that is not as it was generated."""
        answer = self._ask(TakeBatch(step, part), Batch, f"the batch of step {step}")
        if isinstance(answer, Leave):
            log.info("leaving at step %d: %s", step, answer.reason)
            return None
        assert isinstance(answer, Batch)
        if damaged := [t.trajectory_id for t in answer.trajectories if not is_intact(t)]:
            raise LaminarError(
                f"trajectory {damaged[0]} of step {step} has not the digest that it was generated with: its "
                "tokens or log-probs have changed since; look at the store with laminar audit RUN_DIR"
            )
        return answer

    def report(self, step: int, metrics: dict[str, float], mismatches: dict[int, tuple[float, int]]) -> bool:
        """Says that `step` is in the weights; False when the run is to end here."""
        answer = self._ask(StepDone(step, metrics, mismatches), Continue, f"the answer to step {step}")
        if isinstance(answer, Leave):
            log.info("leaving after step %d: %s", step, answer.reason)
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


def _answers(question: TakeBatch | StepDone, heard: Message) -> bool:
    """Else it answers an earlier one, which was asked twice."""
    if isinstance(heard, Batch) and isinstance(question, TakeBatch):
        return (heard.step, heard.part) == (question.step, question.part)
    return heard.step == question.step if isinstance(heard, Continue) else isinstance(heard, Leave)
