"""The lanes of a publication as one trainer rank sees them: it sends some, and brings its slices to the
others.

Used by the publisher's threads, `leader` on rank 0 and `follower` on the others, in step with each other.
"""

import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.chain import EpochProposed
from laminar_hpc.trainer.canonical.exchange import Exchange
from laminar_hpc.trainer.publishing.handover import Handover
from laminar_hpc.trainer.publishing.lane_sender import LaneSender
from laminar_hpc.trainer.publishing.publication import Claim, Publication
from laminar_hpc.weights.kernels.sums import LazySums
from laminar_hpc.weights.lanes import Lane, lane_chunks, lane_manifest
from laminar_hpc.weights.links.streams import settle, streams_of
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.stream import TensorSpan

_READ_FACTOR = 3.0  # of relay.publish_timeout_seconds: other ranks wait for relays before they take slices


class Publishable(Protocol):
    """What publishing needs of the policy."""

    device: torch.device

    @property
    def publishing(self) -> Exchange: ...
    @property
    def lanes(self) -> list[Lane]: ...
    def keep_copy(self) -> None: ...
    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]: ...
    def pack(self, spans: Sequence[TensorSpan], bucket: torch.Tensor | None, lane: int) -> LazySums: ...
    def probe_logprobs(self) -> list[float]: ...


class Sent(NamedTuple):
    """Of all lanes: whether all of each is with its relay; bytes that left, and that would have left in full;
    the fraction of elements that changed, None where it is not known of all lanes."""

    whole: bool
    bytes: int
    full_bytes: int
    changed: float | None


class RankLanes:
    """`mine`: the lanes that this rank sends. Used by one thread, the publisher's."""

    def __init__(self, context: RoleContext, model: Publishable, handover: Handover, seconds: float) -> None:
        """`seconds` bounds each wait for a relay."""
        self._context = context
        self._model = model
        self._handover = handover
        self._exchange = model.publishing
        rank = dist.get_rank()
        self.shared = any(lane.sender != 0 for lane in model.lanes)  # other ranks than 0 send as well
        self._streams = streams_of(model.device)
        self._seconds = seconds
        self.resend = False  # a new link of this rank's wants what was sent last
        whole = layout(model.canonical_metadata(), 0, 0)
        self.mine = [
            LaneSender(context, lane, number, whole, model.device, seconds)
            for number, lane in enumerate(model.lanes)
            if lane.sender == rank
        ]
        self._proposed: dict[int, EpochProposed] = {}  # by lane, the newest that is not followed yet
        self._proposals = threading.Lock()

    # ---- links ---------------------------------------------------------------------------------------------

    @property
    def linked(self) -> bool:
        """Every lane that this rank sends has a link."""
        return all(lane.link is not None for lane in self.mine)

    def follow_membership(self) -> None:
        """Links to the first relays of the newest epochs. Raises StopReceived, and what else came in place of
        a message."""
        if self.mine:
            self._take_proposals()
        for lane in self.mine:
            with self._proposals:
                proposed = self._proposed.pop(lane.number, None)
            if proposed is None:
                continue
            self._handover.awaited = f"relay {proposed.relays[0]} to link"
            lane.follow(proposed, functools.partial(self._replaced, lane))
            if lane.link is not None and proposed.resend:
                self.resend = True

    def _take_proposals(self) -> None:
        """From any thread."""
        while (proposed := self._context.channel.wait(EpochProposed, timeout=0)) is not None:
            assert isinstance(proposed, EpochProposed)
            with self._proposals:
                lane = proposed.epoch % len(self._model.lanes)
                before = self._proposed.get(lane, proposed)
                self._proposed[lane] = max(proposed, before, key=lambda p: p.epoch)

    def _replaced(self, lane: LaneSender) -> bool:
        """The controller wants another link for this lane, or has sent what ends the publisher's thread."""
        try:
            self._take_proposals()
        except Exception:  # it stays in the inbox, for `follow_membership` to raise
            return True
        return lane.number in self._proposed

    def state(self) -> tuple[bool, bool]:
        """Whether all lanes of all ranks have a link, and whether a new one wants what was sent last."""
        of_ranks = self._exchange.all_say([self.linked, self.resend])
        self.resend = False
        return all(linked for linked, _ in of_ranks), any(resend for _, resend in of_ranks)

    # ---- a publication -------------------------------------------------------------------------------------

    def begin(self, publication: Publication, weight_id: int, chunk: int) -> int:
        """`chunk` in bytes; returns the number of chunks of the longest lane. A lane's link is closed when
        the publication is given up."""
        whole = layout(self._model.canonical_metadata(), weight_id, publication.step)
        self._chunks = [
            lane_chunks(lane_manifest(whole, lane.begin, lane.end), chunk) for lane in self._model.lanes
        ]
        for lane in self.mine:
            lane.begin(whole, chunk, functools.partial(self._unwanted, publication, lane))
        return max(map(len, self._chunks))

    def _unwanted(self, publication: Publication, lane: LaneSender) -> bool:
        return publication.claim is Claim.GIVEN_UP or self._replaced(lane)

    @torch.no_grad()
    def send_chunk(self, number: int) -> None:
        """Chunk `number` of every lane: this rank's slices go to the lane's sender; a lane of its own is
        packed whole into a bucket that is then on its way."""
        mine = {lane.number: lane for lane in self.mine}
        for lane, chunks in enumerate(self._chunks):
            if number >= len(chunks):
                continue
            if lane not in mine:
                self._model.pack(chunks[number], None, lane)
                continue
            bucket = mine[lane].bucket()
            mine[lane].post(bucket, chunks[number], self._model.pack(chunks[number], bucket, lane))

    def settle(self, what: str = "the reading of the live weights") -> None:
        """Returns when all is done that this thread has enqueued, `what`: on a GPU slices that were sent and
        buckets that were packed are still read. Raises LaminarError when that takes too long."""
        try:
            settle(self._streams, _READ_FACTOR * self._seconds, what)
        except LaminarError as error:
            raise LaminarError(
                f"trainer {dist.get_rank()} {error}; see the other trainers' logs: they take its slices"
            ) from None

    def end(self) -> Sent:
        """The last chunks leave, and the sums behind them; collective where the lanes are shared."""
        for lane in self.mine:
            lane.end()
        own = [[lane.sent, lane.bytes_sent, lane.full_bytes, *lane.bytes_changed] for lane in self.mine]
        of_ranks = own
        if self.shared:
            of_ranks = self._exchange.all_say([sum(each) for each in zip(*own, strict=True)] or [0] * 5)
        sent, count, full, known, changed = (sum(each) for each in zip(*of_ranks, strict=True))
        lanes = self._model.lanes
        fraction = changed / lanes[-1].end if known == len(lanes) else None
        return Sent(sent == len(lanes), count, full, fraction)
