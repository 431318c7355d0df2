"""The publisher's thread of trainer 0: it decides what is sent and released, and tells the other ranks'
threads.

Waits for: weights to publish and a link to a relay, looking again every POLL_SECONDS; a weight id and the
relays, each for relay.publish_timeout_seconds. While there is no controller the wait for an id goes on until
the trainer gives these weights up. Nobody but the fence waits for it.
"""

import itertools
import logging
import time

from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.publication import LaneSenders, NewWeightId, Published, WeightId
from laminar_hpc.policies.chain import chunk_bytes
from laminar_hpc.trainer.publishing.commands import PublishingCommand, give
from laminar_hpc.trainer.publishing.handover import POLL_SECONDS, Handover
from laminar_hpc.trainer.publishing.publication import (
    Claim,
    Publication,
    PublicationEvent,
    PublicationProgress,
)
from laminar_hpc.trainer.publishing.rank_lanes import Publishable, RankLanes, Sent

log = logging.getLogger(__name__)
_NO_LINK = "a relay to join"


class _PublicationGivenUp(Exception):
    """The trainer no longer waits for these weights to leave."""


class PublishingLeader:
    """Called by `Publisher._run`, turn after turn."""

    def __init__(
        self, context: RoleContext, model: Publishable, lanes: RankLanes, handover: Handover
    ) -> None:
        self._context = context
        self._model = model
        self._lanes = lanes
        self._handover = handover
        self._exchange = model.publishing
        self._seconds = context.config.relay.publish_timeout_seconds
        self._max_chunk = context.config.relay.chunk_megabytes << 20
        self._requests = itertools.count(1)
        self._session: int | None = None  # that knows who sends

    def turn(self) -> None:
        """Sends, releases or waits, whichever is due."""
        self._say_who_sends()
        publication = self._await_work()
        if publication is None:
            return
        if self._lanes.shared:
            self._ask_others(publication)
        if publication.progress is PublicationProgress.READING:
            self._try_to_send(publication)
        elif publication.fenced:
            self._release(publication)
        elif not self._lanes.shared:
            give(self._exchange, PublishingCommand.WAIT)

    def _say_who_sends(self) -> None:
        """To each controller, before it makes links."""
        channel, lanes = self._context.channel, self._model.lanes
        if len(lanes) > 1 and self._session != channel.sessions:
            self._session = channel.sessions
            channel.send(LaneSenders([lane.sender for lane in lanes]))

    def _await_work(self) -> Publication | None:
        """The live publication; where this rank sends all lanes, it is READING if it can go out. Waits a
        moment when there is nothing to do."""
        with self._handover.changed:
            publication, linked = self._handover.live, self._lanes.linked
            if publication is not None and not self._lanes.shared:
                self._may_start(publication, linked, self._lanes.resend)
                self._lanes.resend = False
            due = publication is not None and linked and publication.progress is not PublicationProgress.SENT
            if publication is None or not (due or publication.fenced):
                self._handover.awaited = "nothing" if linked else _NO_LINK
                self._handover.changed.wait(POLL_SECONDS)
        return publication

    def _ask_others(self, publication: Publication) -> None:
        """READING from here on if all lanes of all ranks have links and want the weights."""
        give(self._exchange, PublishingCommand.STATE)
        linked, resend = self._lanes.state()
        with self._handover.changed:
            self._may_start(publication, linked, resend)
            if not linked and publication.claim is Claim.WORKING:
                self._handover.awaited = _NO_LINK
                self._handover.changed.wait(POLL_SECONDS)

    def _may_start(self, publication: Publication, linked: bool, resend: bool) -> None:
        """With the lock."""
        if resend and publication.allows(PublicationEvent.RESEND):
            publication.advance(PublicationEvent.RESEND)
        if linked and publication.allows(PublicationEvent.START):
            publication.advance(PublicationEvent.START)

    def _try_to_send(self, publication: Publication) -> None:
        try:
            self._send(publication)
        except _PublicationGivenUp:
            pass
        finally:
            self._lanes.settle()
            with self._handover.changed:
                if publication.progress is not PublicationProgress.SENT:
                    publication.advance(PublicationEvent.BROKE)
                    if publication.claim is Claim.RELEASED:
                        log.warning(
                            "the weights of step %d are lost with a link: they have changed since",
                            publication.step,
                        )
                self._handover.changed.notify_all()

    def _send(self, publication: Publication) -> None:
        """Returns with the publication SENT, unless a link broke."""
        lanes, started = self._lanes, time.time()
        self._handover.awaited = "a weight id of the controller"
        answer = self._ask_for_id(publication)
        first = lanes.mine[0].link
        if first is None:
            return
        self._handover.awaited = lanes.mine[0].peer
        size = max(lane.end - lane.begin for lane in self._model.lanes)
        chunk = chunk_bytes(size, answer.relays, first.start_seconds, first.seconds_per_byte, self._max_chunk)
        give(self._exchange, PublishingCommand.BEGIN, chunk, answer.weight_id)
        chunks = lanes.begin(publication, answer.weight_id, chunk)
        for number in range(chunks):
            if not (lanes.shared or any(lane.link for lane in lanes.mine)):
                break  # nobody is left to send to
            give(self._exchange, PublishingCommand.CHUNK, number)
            lanes.send_chunk(number)
            if number == chunks - 1:
                self._all_read(publication)
        sent = lanes.end()
        if sent.whole:
            self._report(publication, answer.weight_id, started, sent)
            with self._handover.changed:
                publication.advance(PublicationEvent.ARRIVED)
                self._handover.changed.notify_all()

    def _ask_for_id(self, publication: Publication) -> WeightId:
        """Asks each controller anew. Raises _GivenUp: no controller has come in time to answer."""
        request = next(self._requests)

        def meanwhile() -> None:
            if publication.claim is Claim.GIVEN_UP:
                raise _PublicationGivenUp
            give(self._exchange, PublishingCommand.WAIT)

        answer = self._context.channel.request(
            NewWeightId(publication.step, request),
            WeightId,
            timeout=self._seconds,
            what="a weight id",
            fits=lambda found: isinstance(found, WeightId) and found.request == request,
            meanwhile=meanwhile,
        )
        assert isinstance(answer, WeightId)
        return answer

    def _all_read(self, publication: Publication) -> None:
        self._lanes.settle()
        with self._handover.changed:
            publication.advance(PublicationEvent.ALL_READ)
            publication.goes_on(time.monotonic())
            fenced = publication.fenced
            self._handover.changed.notify_all()
        if fenced:
            self._release(publication)
        elif self._lanes.shared:
            give(self._exchange, PublishingCommand.END)

    def _release(self, publication: Publication) -> None:
        give(self._exchange, PublishingCommand.RELEASE)
        with self._handover.changed:
            self._handover.release(publication)

    def _report(self, publication: Publication, weight_id: int, started: float, sent: Sent) -> None:
        """To the trace and the controller."""
        now = time.time()
        self._context.trace.record("send", started, now, step=publication.step, weight_id=weight_id)
        self._context.channel.send(
            Published(
                weight_id,
                publication.step,
                publication.stall_seconds,
                publication.probe_seconds,
                now - started,
                sent.bytes,
                publication.probe,
                now,
                sent.full_bytes,
                sent.changed,
            )
        )
