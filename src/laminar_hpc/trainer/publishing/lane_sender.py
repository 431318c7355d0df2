"""One lane's way out of the trainer: the link to the first relay of its chain, and two buckets that are
filled and sent in turn; with relay.delta=auto as what changed in them, if the link's other end has what it
changed from (weights/delta.py). Buckets of a GPU leave it over NCCL, or by a copy to pinned host memory,
which a relay of this machine maps.

Used by the publisher's thread of the rank that sends the lane. A link that breaks is reported, and the lane
says no more until there is another one; the other lanes go on.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from laminar_hpc.line.address import own_address
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.chain import EpochProposed, LinkDown, StoreOpened
from laminar_hpc.weights.delta import Image, unit_bytes
from laminar_hpc.weights.kernels.sums import LazySums, add_sums
from laminar_hpc.weights.lanes import Lane, lane_manifest, lane_sums
from laminar_hpc.weights.links.link_waits import made_unless
from laminar_hpc.weights.links.links import Link, Posted
from laminar_hpc.weights.links.meeting import LinkBroken, host_store
from laminar_hpc.weights.links.streams import settle, streams_of
from laminar_hpc.weights.links.transport import NCCL
from laminar_hpc.weights.links.window import Window
from laminar_hpc.weights.manifest import Manifest
from laminar_hpc.weights.stream import TensorSpan, encode_header, encode_sums

log = logging.getLogger(__name__)


class LaneSender:
    """A publication is `begin`, then `bucket` and `post` for each chunk in order, then `end`; after a
    LinkBroken they do nothing."""

    def __init__(
        self,
        context: RoleContext,
        lane: Lane,
        number: int,
        whole: Manifest,
        device: torch.device,
        seconds: float,
    ) -> None:
        self.number = number
        self.link: Link | None = None
        self._context = context
        self._lane = lane
        self._device = device
        self._seconds = seconds
        self._address = own_address(context.config.cluster.host)
        self.nbytes = lane.end - lane.begin
        size = min(context.config.relay.chunk_megabytes << 20, self.nbytes)
        self._streams = streams_of(device)
        self._transport = context.config.relay.transport
        self._window: Window | None = None
        if self._transport != NCCL:
            self._window = Window(2 * size)
            self._streams.pin(self._window.tensor)
        if self._window is not None and not self._streams.name:
            both = self._window.tensor  # packed where it leaves from
        else:
            both = self._streams.empty(2 * size)
        self._buckets = [both[:size], both[size:]]
        log.info("lane %d: two staging buckets of %.1f MB on %s", number, size / 1e6, device)
        self.image: Image | None = None  # of what was published last
        if context.config.relay.delta == "auto":
            memory = torch.empty(self.nbytes, dtype=torch.uint8)
            self._streams.pin(memory)  # torch's own pinned memory comes in powers of two
            self.image = Image(memory, unit_bytes(whole), context.config.relay.full_every)
        self._base_id: int | None = None  # of a publication that goes as changes
        self._on_the_way: deque[list[tuple[Posted, torch.Tensor]]] = deque()  # of the last two buckets
        self._watch = contextlib.ExitStack()
        self.sent = False  # the publication, whole
        # of the publication, layout and sums included; and what it would have been in full
        self.bytes_sent = self.full_bytes = 0
        self.bytes_changed = (False, 0)  # whether that is known, and those of changed elements

    @property
    def peer(self) -> str:
        return "a relay to join" if self.link is None else self.link.peer

    def follow(self, proposed: EpochProposed, given_up: Callable[[], bool]) -> None:
        """Links to the master relay of this epoch; the leader's store listens on the run's address only."""
        if self.link is not None:
            self.link.close()
        self.link = None
        store, port = host_store(self._address, self._seconds)
        self._context.channel.send(StoreOpened(proposed.epoch, self._address, port))
        peer = f"relay {proposed.relays[0]}"

        def make() -> Link:
            place = (store, proposed.epoch, 0, True, peer, self._address, self._device, self._seconds)
            return Link(*place, given_up=given_up, leave=True, window=self._window, transport=self._transport)

        try:
            self.link = made_unless(given_up, make)
        except LinkBroken as error:
            self._context.channel.send(LinkDown(proposed.epoch, str(error)))
            return
        log.info(
            "lane %d, epoch %d: linked to %s, transport %s",
            self.number,
            proposed.epoch,
            peer,
            self.link.transport,
        )

    # ---- a publication -------------------------------------------------------------------------------------

    def begin(self, whole: Manifest, chunk: int, given_up: Callable[[], bool]) -> None:
        """The link is closed as soon as `given_up()` holds."""
        self._manifest = lane_manifest(whole, self._lane.begin, self._lane.end)
        self._chunk = chunk
        self._number = 0
        self._began = time.monotonic()
        self._sums = dict[int, tuple[int, int]]()
        self._data_bytes = 0
        self._on_the_way.clear()
        self.sent = False
        self.bytes_sent = 0
        self.full_bytes = 0
        self.bytes_changed = (False, 0)
        if self.link is not None:
            self._watch.enter_context(self.link.closed_when(given_up))
            self._base_id = self.image.begin(self.link.weight_id) if self.image is not None else None
            with self._careful(self.link) as link:
                link.send_bytes(encode_header(self._manifest, chunk, self._base_id))

    def bucket(self) -> torch.Tensor:
        """To be filled with the next chunk, once what it held has left."""
        number = self._number
        self._number = self._number + 1
        if len(self._on_the_way) == 2 and self.link is not None:
            with self._careful(self.link) as link:
                for sent in self._on_the_way.popleft():
                    link.finish(*sent)
        return self._buckets[number % 2][: min(self._chunk, self.nbytes - number * self._chunk)]

    def post(self, bucket: torch.Tensor, spans: Sequence[TensorSpan], read: LazySums) -> None:
        """Begins to send the bucket, which holds `spans`; `read()` gives what they add to the sums of their
        tensors."""
        if self.link is None:
            return
        with self._careful(self.link) as link:
            chunk = self._in_host_memory(bucket) if link.device_end is None else bucket
            posted: list[tuple[Posted, torch.Tensor]] = []
            self._on_the_way.append(posted)
            if self.image is not None and self._base_id is not None:
                taken = read()  # while the bucket is whole
                for each in self.image.take(self._first(), chunk, True) or ():
                    posted.append((link.post_send(each), each))
            else:
                posted.append((link.give(chunk), chunk))
                taken = read()
                if self.image is not None:
                    self.image.take(self._first(), chunk, False)
            self._data_bytes += sum(each.nbytes for _, each in posted)
            for span, both in zip(spans, taken, strict=True):
                self._sums[span.tensor] = add_sums([self._sums.get(span.tensor, (0, 0)), both])

    def _in_host_memory(self, bucket: torch.Tensor) -> torch.Tensor:
        """The bucket's bytes in the window, where a copy of them has been made unless the bucket lies there;
        the other half of the window is with the relay meanwhile."""
        if not self._streams.holds(bucket):
            return bucket
        assert self._window is not None
        half = self._window.tensor.numel() // 2 * ((self._number - 1) % 2)
        chunk = self._window.tensor[half : half + bucket.numel()]
        self._streams.copy(chunk, bucket)
        # what it copies may have to come from other ranks, which wait for relays of their own
        settle(self._streams, 3 * self._seconds, f"a bucket of lane {self.number}")
        return chunk

    def end(self) -> None:
        """The last buckets leave, and the sums behind them."""
        if self.link is not None:
            with self._careful(self.link) as link:
                for sent in [each for posted in self._on_the_way for each in posted]:
                    link.finish(*sent)
                link.send_bytes(encode_sums(lane_sums(self._manifest, self._sums)))
                link.weight_id = self._manifest.weight_id
                if self.image is not None:
                    changed = self.image.complete(self._manifest.weight_id)
                    self.bytes_changed = (changed is not None, round((changed or 0.0) * self.nbytes))
                if self._base_id is None:  # else the pace was that of comparing
                    link.sent(self.nbytes, self._number, time.monotonic() - self._began)
                self.sent = True
        self.full_bytes = self.bytes_sent + self.nbytes - self._data_bytes
        self._on_the_way.clear()
        self._watch.close()

    def _first(self) -> int:
        """Where in the lane the bucket begins that `bucket` gave last."""
        return (self._number - 1) * self._chunk

    @contextlib.contextmanager
    def _careful(self, link: Link) -> Iterator[Link]:
        before = link.bytes_sent
        try:
            yield link
        except LinkBroken as error:
            self.link = None
            self._watch.close()
            self._context.channel.send(LinkDown(link.epoch, str(error)))
            link.close()
        finally:
            self.bytes_sent += link.bytes_sent - before
