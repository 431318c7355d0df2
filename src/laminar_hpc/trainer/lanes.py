"""One lane's way out of the trainer: the link to the first relay of its chain, and two buckets that are filled and sent in turn.

Used by the publisher's thread of the rank that sends the lane. A link that breaks is reported, and the lane says no more until there is
another one; the other lanes go on.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from laminar_hpc import messages as m
from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.cluster.links import Link, LinkBroken, host_store, own_address
from laminar_hpc.trainer.canonical import TensorSums
from laminar_hpc.weights.lanes import Lane, lane_chunks, lane_manifest, lane_sums
from laminar_hpc.weights.manifest import Manifest
from laminar_hpc.weights.stream import Part, encode_header, encode_sums
from laminar_hpc.weights.sums import add_sums

log = logging.getLogger(__name__)


class LaneSender:
    """A publication is `begin`, then `bucket` and `post` for each chunk in order, then `end`; after a LinkBroken they do nothing."""

    def __init__(self, context: RoleContext, lane: Lane, number: int, device: torch.device, seconds: float) -> None:
        self.number, self.link = number, None
        self._context, self._lane, self._device, self._seconds = context, lane, device, seconds
        self._address = own_address(context.config.cluster.host)
        self.nbytes = lane.end - lane.begin
        size = min(context.config.relay.chunk_megabytes << 20, self.nbytes)
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        log.info("lane %d: two staging buckets of %.1f MB on %s", number, size / 1e6, device)
        self._epoch = 0
        self._on_the_way: list[tuple[dist.Work, torch.Tensor]] = []
        self._watch = contextlib.ExitStack()
        self.sent = False  # the publication, whole
        self.bytes_sent = 0  # of the publication, layout and sums included

    link: Link | None

    @property
    def peer(self) -> str:
        return "a relay to join" if self.link is None else self.link.peer

    def follow(self, proposed: m.EpochProposed, given_up: Callable[[], bool]) -> None:
        """Links to the master relay of this epoch; the leader's store listens on the run's address only."""
        if self.link is not None:
            self.link.close()
        self._epoch, self.link = proposed.epoch, None
        store, port = host_store(self._address, self._seconds)
        self._context.channel.send(m.StoreOpened(proposed.epoch, self._address, port))
        peer = f"relay {proposed.relays[0]}"
        try:
            self.link = Link(store, proposed.epoch, 0, True, peer, self._address, self._device, self._seconds, given_up=given_up)
        except LinkBroken as error:
            self._context.channel.send(m.LinkDown(proposed.epoch, str(error)))
            return
        log.info("lane %d, epoch %d: linked to %s", self.number, proposed.epoch, peer)

    # ---- a publication ---------------------------------------------------------------------------------------------------------

    def begin(self, whole: Manifest, chunk: int, given_up: Callable[[], bool]) -> None:
        """The link is closed as soon as `given_up()` holds."""
        self._manifest = lane_manifest(whole, self._lane.begin, self._lane.end)
        self._chunk, self._number, self._began = chunk, 0, time.monotonic()
        self._on_the_way, self._sums = [], dict[int, tuple[int, int]]()
        self.sent, self.bytes_sent = False, 0
        if self.link is not None:
            self._watch.enter_context(self.link.closed_when(given_up))
            with self._careful(self.link) as link:
                link.send_bytes(encode_header(self._manifest, chunk))

    def chunks(self) -> list[list[Part]]:
        return lane_chunks(self._manifest, self._chunk)

    def bucket(self) -> torch.Tensor:
        """To be filled with the next chunk, once what it held has left."""
        number, self._number = self._number, self._number + 1
        if number >= 2 and self.link is not None:
            with self._careful(self.link) as link:
                link.finish(*self._on_the_way[number - 2])
        return self._buckets[number % 2][: min(self._chunk, self.nbytes - number * self._chunk)]

    def post(self, bucket: torch.Tensor, parts: Sequence[Part], read: TensorSums) -> None:
        """Begins to send the bucket, which holds `parts`; `read()` gives what they add to the sums of their tensors."""
        if bucket.is_cuda:
            torch.cuda.current_stream().synchronize()
        if self.link is None:
            return
        with self._careful(self.link) as link:
            self._on_the_way.append((link.post_send(bucket), bucket))
            for part, both in zip(parts, read(), strict=True):
                self._sums[part.tensor] = add_sums([self._sums.get(part.tensor, (0, 0)), both])

    def end(self) -> None:
        """The last buckets leave, and the sums behind them."""
        if self.link is not None:
            with self._careful(self.link) as link:
                for sent in self._on_the_way[-2:]:
                    link.finish(*sent)
                link.send_bytes(encode_sums(lane_sums(self._manifest, self._sums)))
                link.sent(self.nbytes, len(self._on_the_way), time.monotonic() - self._began)
                self.sent = True
        self._watch.close()

    def close(self) -> None:
        self._watch.close()
        if self.link is not None:
            self.link.close()

    @contextlib.contextmanager
    def _careful(self, link: Link):
        before = link.bytes_sent
        try:
            yield link
        except LinkBroken as error:
            self.link = None
            self._watch.close()
            self._context.channel.send(m.LinkDown(self._epoch, str(error)))
            link.close()
        finally:
            self.bytes_sent += link.bytes_sent - before
