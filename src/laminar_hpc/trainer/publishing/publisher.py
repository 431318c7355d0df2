"""The trainer's door to publishing: its live weights leave for the first relays while it goes on.

    trainer    publish(s) | forward, backward of step s ......... | fence() | optimizer.step | publish(s + 1)
    publisher             | id, then chunk by chunk: pack, send   | tail: the last chunks, the sums |

Each is a thread. `publish` only hands over; the publisher's thread reads the live parameters into two buckets
in turn, of relay.chunk_megabytes at most, on the sending device: one is packed while the other is on its way.
`fence`, before the parameters change, waits until they are all read; with relay.publish=copied they are read
from a copy, and the next `publish` waits in its place. With a relay that does not take them it
waits relay.publish_timeout_seconds at most; then, or without a link, these weights are given up: skipping an
id is legal, the next ones go out. Until the fence, a broken link's weights are sent again as soon as there is
a new epoch.

Every trainer rank that holds slices, or sends a lane, has such a thread: `leader` on rank 0, `follower` on
the others. All lanes' chunks of one number are packed and sent before those of the next. Used by
`trainer.loop`.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.trainer.publishing.commands import PublishingCommand, give
from laminar_hpc.trainer.publishing.follower import PublishingFollower
from laminar_hpc.trainer.publishing.handover import Handover
from laminar_hpc.trainer.publishing.leader import PublishingLeader
from laminar_hpc.trainer.publishing.publication import Publication, PublicationEvent, PublicationProgress
from laminar_hpc.trainer.publishing.rank_lanes import Publishable, RankLanes
from laminar_hpc.weights.links.streams import streams_of

log = logging.getLogger(__name__)


class Publisher:
    """One per trainer rank. `publish`, `fence` and `close` are called by the trainer's thread."""

    def __init__(self, context: RoleContext, model: Publishable) -> None:
        self._context = context
        self._model = model
        self._exchange = model.publishing
        self._blocking = context.config.relay.publish == "blocking"
        self._copied = context.config.relay.publish == "copied"
        self._seconds = context.config.relay.publish_timeout_seconds
        self._handover = Handover()
        self._leader: PublishingLeader | None = None  # on rank 0
        self._holder = dist.get_rank() in self._exchange.ranks
        if not self._holder:
            return
        self.lanes = RankLanes(context, model, self._handover, self._seconds)
        if dist.get_rank() == 0:
            self._leader = PublishingLeader(context, model, self.lanes, self._handover)
        self._worker = self._leader or PublishingFollower(model, self.lanes, self._handover)
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, step: int) -> None:
        """The live weights are those of step `step`. Collective, for the probe. Raises LaminarError if
        publishing failed, or when the probe's log-probs are not finite.

        With relay.publish=blocking rank 0 stands still here until they are read, for
        relay.publish_timeout_seconds at most.
        """
        self._release_last()
        started = time.monotonic()
        probe = self._model.probe_logprobs()
        handed = time.monotonic()
        if not all(map(math.isfinite, probe)):
            raise LaminarError(
                f"the weights of step {step} are finite, but the log-probs that they give to the "
                "fixed probe are not: they are too large to compute with, and were not published; "
                "lower optimizer.lr, then go on from the newest checkpoint with resume=auto"
            )
        if not self._holder:
            return
        if self._copied:
            self._model.keep_copy()
        # the publisher's thread has a stream of its own
        self.lanes.settle("the probe")
        publication = Publication(step, probe, handed - started, stall_seconds=time.monotonic() - handed)
        with self._handover.changed:
            self._handover.raise_error()
            self._handover.hand(publication)
            if self._leader is not None and self._blocking:
                self._stand_still(publication)

    def _stand_still(self, publication: Publication) -> None:
        """With the lock: until all is read, or the time is over."""
        publication.waiting_since = time.monotonic()
        if not self._wait_until(
            lambda: publication.progress in (PublicationProgress.READ, PublicationProgress.SENT),
            self._seconds,
        ):
            log.warning(
                "the weights of step %d wait for %s; training goes on",
                publication.step,
                self._handover.awaited,
            )
        publication.goes_on(time.monotonic())

    def fence(self) -> None:
        """Before the weights change: waits until nothing reads them any more.

        Raises LaminarError if publishing has failed, or names who holds up the thread that reads when it does
        not let go.
        """
        if not self._copied:
            self._release_last()

    def _release_last(self) -> None:
        sends = self._holder and self.lanes.mine
        self._await_release(self._seconds if sends else 3 * self._seconds)

    def close(self) -> None:
        """Waits until the last weights are with the first relays. Raises LaminarError when they are not in
        time; time without a controller, who has links made and gives ids, does not count."""
        limit = 2 * self._seconds
        with self._handover.changed:
            live = self._handover.live
            if self._leader is not None and live is not None and not self._wait_until_sent(live, limit):
                raise LaminarError(
                    f"the last weights were not with the master relay after {limit:.0f} s; "
                    f"it waits for {self._handover.awaited}"
                )
        self._await_release(3 * self._seconds)
        with self._handover.changed:
            self._handover.closing = True
            self._handover.changed.notify_all()
        if self._holder:
            self._thread.join(5)

    def _wait_until_sent(self, live: Publication, seconds: float) -> bool:
        """With the lock."""
        while not (sent := self._wait_until(lambda: live.progress is PublicationProgress.SENT, seconds)):
            if not self._context.channel.detached:
                break
        return sent

    def _await_release(self, seconds: float) -> None:
        handover = self._handover
        with handover.changed:
            handover.raise_error()
            live = handover.live
            if live is None:
                return
            live.advance(PublicationEvent.FENCE)
            live.waiting_since = time.monotonic()
            handover.changed.notify_all()
            if self._may_release(live):
                handover.release(live)
            if self._wait_until(lambda: handover.live is not live, seconds):
                return
            log.warning(
                "the weights of step %d are given up after %.0f s: %s does not take them",
                live.step,
                seconds,
                handover.awaited,
            )
            live.advance(PublicationEvent.GIVE_UP)
            handover.changed.notify_all()
            if not self._wait_until(lambda: handover.live is not live, self._seconds):
                raise LaminarError(
                    f"publishing has not let go of the weights of step {live.step} for {seconds:.0f} s: "
                    f"it waits for {handover.awaited if self._leader is not None else 'trainer 0'}"
                )

    def _may_release(self, live: Publication) -> bool:
        """Without the publisher's thread, which may be busy with a link or the tail: where no other rank
        takes part, and these weights are read or have nowhere to go."""
        alone = self._leader is not None and len(self._exchange.ranks) == 1
        has_been_read = live.progress in (PublicationProgress.READ, PublicationProgress.SENT)
        return alone and live.allows(PublicationEvent.RELEASE) and (has_been_read or not self.lanes.linked)

    def _wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        return self._handover.wait_until(reached, seconds, self._thread)

    # ---- the publisher's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            streams = streams_of(self._model.device)
            with streams.on(streams.stream()):  # beside the one that trains
                while not self._handover.closing:
                    self.lanes.follow_membership()
                    self._worker.turn()
        except StopReceived:
            return
        except Exception as error:
            log.exception("publishing failed")
            with self._handover.changed:
                self._handover.error = error
            self._context.channel.when_failed(error)
        finally:
            held = self._handover.end()
            if self._leader is not None and held is not None:
                with contextlib.suppress(LaminarError):
                    give(self._exchange, PublishingCommand.RELEASE)
