"""Publishing: the trainer's live weights leave for the master relay while the trainer goes on.

    trainer's thread     publish(s) | forward, backward of step s ......... | fence() | optimizer.step | publish(s + 1) | ...
    publisher's thread              | id, then bucket by bucket: pack, send | tail: the last buckets, the sums |

`publish` only hands over; the publisher's thread reads the live parameters into two buckets in turn, of relay.chunk_megabytes at most, on
the sending device: one is packed while the other is on its way. `fence`, before the parameters change, waits until they are all read. With
a relay that does not take them it waits relay.publish_timeout_seconds at most; then, or without a link, these weights are given up:
skipping an id is legal, the next ones go out. Until the fence, a broken link's weights are sent again as soon as there is a new epoch.
With relay.delta=auto a bucket leaves as what changed in it, if the link's other end has what it changed from (weights/delta.py).

Every trainer rank that holds slices has such a thread. Rank 0's decides, and says by one word per bucket what the others do.
Used by `trainer.loop` (publish, fence, close).
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from laminar_hpc import messages as m
from laminar_hpc.cluster.channel import StopReceived
from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.cluster.links import Link, LinkBroken, host_store, own_address
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.policies.chain import chunk_bytes
from laminar_hpc.trainer.canonical import TensorSums
from laminar_hpc.trainer.exchange import Exchange
from laminar_hpc.weights.delta import Image, unit_bytes
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.stream import Part, chunks, encode_header, encode_sums
from laminar_hpc.weights.sums import add_sums

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_WAIT, _RELEASE = -1, -2  # words beside the numbers of buckets; any other one below 0 is the size of the buckets that follow


class Publishable(Protocol):
    """What the publisher needs of the policy."""

    device: torch.device

    @property
    def publishing(self) -> Exchange: ...
    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]: ...
    def pack(self, parts: Sequence[Part], bucket: torch.Tensor | None) -> TensorSums: ...
    def probe_logprobs(self) -> list[float]: ...


@dataclass
class Publication:
    """The live weights of one step, from `publish` until they may change."""

    step: int
    probe: list[float]
    probe_seconds: float
    stall_seconds: float = 0.0  # in which the trainer stood still
    waiting_since: float | None = None  # the trainer stands still
    fenced: bool = False  # the trainer wants to change them
    given_up: bool = False
    read: bool = False  # all of them, so they may change
    sent: bool = False


class Publisher:
    def __init__(self, context: RoleContext, model: Publishable) -> None:
        self._context, self._model = context, model
        self._config, self._seconds = context.config, context.config.relay.publish_timeout_seconds
        self._lead, self._exchange = dist.get_rank() == 0, model.publishing
        self._holder = dist.get_rank() in self._exchange.ranks
        self.weight_id = -1
        self._live: Publication | None = None
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._doing = "nothing"  # of the thread, for errors
        self._closing = self._reading = False
        if not self._holder:
            return
        self._layout = layout(model.canonical_metadata(), 0, 0)
        self._bytes, self._most = self._layout.data_bytes, self._config.relay.chunk_megabytes << 20
        if self._lead:
            self._address = own_address(self._config.cluster.host)
            size = min(self._most, self._bytes)
            self._buckets = [torch.empty(size, dtype=torch.uint8, device=model.device) for _ in range(2)]
            log.info("two staging buckets of %.1f MB on %s", size / 1e6, model.device)
            self._image: Image | None = None  # of what was published last
            if self._config.relay.delta == "auto":
                self._image = Image(self._bytes, unit_bytes(self._layout), model.device, self._config.relay.anchor_every)
            self._epoch = 0
            self._link: Link | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    # ---- called by the trainer -------------------------------------------------------------------------------------------------

    def publish(self, step: int) -> None:
        """The live weights are those of step `step`. Collective, for the probe. Raises LaminarError if publishing failed.

        With relay.publish=blocking rank 0 stands still here until they are read, for relay.publish_timeout_seconds at most.
        """
        self.fence()
        started = time.monotonic()
        probe = self._model.probe_logprobs()
        handed = time.monotonic()
        if not self._holder:
            return
        if self._model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the thread has a stream of its own
        live = Publication(step, probe, handed - started, stall_seconds=time.monotonic() - handed)
        with self._changed:
            self._raise()
            self._live = live
            self._changed.notify_all()
            if self._lead and self._config.relay.publish == "blocking":
                live.waiting_since = time.monotonic()
                if not self._wait_until(lambda: live.read, self._seconds):
                    log.warning("the weights of step %d wait for %s; training goes on", step, self._doing)
                self._stood_still(live)

    def fence(self) -> None:
        """Before the weights change: waits until nothing reads them any more.

        Raises LaminarError if publishing has failed, or names who holds up the thread that reads when it does not let go.
        """
        self._await_release(self._seconds if self._lead else 3 * self._seconds)

    def close(self) -> None:
        """Waits until the last weights are with the master relay. Raises LaminarError when they are not in time."""
        with self._changed:
            live = self._live
            if self._lead and live is not None and not self._wait_until(lambda: live.sent, 2 * self._seconds):
                raise LaminarError(
                    f"the last weights were not with the master relay after {2 * self._seconds:.0f} s; it waits for {self._doing}"
                )
        self._await_release(3 * self._seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._holder:
            self._thread.join(5)

    def _await_release(self, seconds: float) -> None:
        with self._changed:
            self._raise()
            live = self._live
            if live is None:
                return
            live.fenced, live.waiting_since = True, time.monotonic()
            self._changed.notify_all()
            if self._lead and len(self._exchange.ranks) == 1 and not self._reading and (live.read or self._link is None):
                self._let_go(live)
            if self._wait_until(lambda: self._live is not live, seconds):
                return
            log.warning("the weights of step %d are given up after %.0f s: %s does not take them", live.step, seconds, self._doing)
            live.given_up = True
            self._changed.notify_all()
            if not self._wait_until(lambda: self._live is not live, self._seconds):
                who = self._doing if self._lead else "trainer 0"
                raise LaminarError(f"publishing has not let go of the weights of step {live.step} for {seconds:.0f} s: it waits for {who}")

    def _wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """With the lock: whether it came true within `seconds`. Raises if publishing failed; nothing is awaited of a thread that ended."""
        deadline = time.monotonic() + seconds
        while not reached() and self._thread.is_alive():
            self._raise()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, 1.0))
        self._raise()
        return True

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- the publisher's thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._model.device.type == "cuda":
                torch.cuda.set_device(self._model.device)
                torch.cuda.set_stream(torch.cuda.Stream())
            while not self._closing:
                if self._lead:
                    self._follow_membership()
                    self._turn()
                else:
                    self._follow_the_lead()
        except StopReceived:
            return
        except Exception as error:
            log.exception("publishing failed")
            with self._changed:
                self._error = error
        finally:
            with self._changed:
                held, self._live = self._live, None
                self._changed.notify_all()
            if self._lead and held is not None:
                with contextlib.suppress(LaminarError):
                    self._exchange.word(_RELEASE)

    def _follow_the_lead(self) -> None:
        """Another rank: its slices of each bucket that rank 0 names, until the weights are released."""
        with self._changed:
            live = self._live
            if live is None:
                self._changed.wait(_POLL_SECONDS)
                return
        parts: list[list[Part]] = []
        while (word := self._exchange.word()) != _RELEASE:
            if word >= 0:
                self._model.pack(parts[word], None)
            elif word != _WAIT:
                parts = chunks(self._layout, -word)
        with self._changed:
            self._live = None
            self._changed.notify_all()

    def _follow_membership(self) -> None:
        """Links to the master relay of the newest epoch; the leader's store listens on the run's address only."""
        proposed = self._context.channel.wait(m.EpochProposed, timeout=0)
        if proposed is None:
            return
        while (newer := self._context.channel.wait(m.EpochProposed, timeout=0)) is not None:
            proposed = newer
        assert isinstance(proposed, m.EpochProposed)
        if self._link is not None:
            self._link.close()
        self._epoch, self._link = proposed.epoch, None
        store, port = host_store(self._address, self._seconds)
        self._context.channel.send(m.StoreOpened(proposed.epoch, self._address, port))
        peer = f"relay {proposed.relays[0]}"
        self._doing = f"{peer} to link"
        try:
            link = Link(
                store, proposed.epoch, 0, True, peer, self._address, self._model.device, self._seconds, given_up=self._another_master
            )
        except LinkBroken as error:
            self._context.channel.send(m.LinkDown(proposed.epoch, str(error)))
            return
        log.info("epoch %d: linked to %s", proposed.epoch, peer)
        with self._changed:
            self._link = link
            if proposed.resend and self._live is not None:
                self._live.sent = False

    def _another_master(self) -> bool:
        """The controller wants another link in place of this one."""
        return self._context.channel.pending(m.EpochProposed)

    def _turn(self) -> None:
        """Sends, releases or waits, whichever is due."""
        with self._changed:
            live = self._live
            due = live is not None and not live.sent and self._link is not None
            if live is None or not (due or live.fenced):
                self._doing = "a relay to join" if self._link is None else "nothing"
                self._changed.wait(_POLL_SECONDS)
            if due:
                assert live is not None
                live.read, self._reading = False, True
        if live is None:
            return
        if due:
            self._try_to_send(live)
        elif live.fenced:
            self._release(live)
        else:
            self._exchange.word(_WAIT)

    def _try_to_send(self, live: Publication) -> None:
        try:
            self._send(live)
        except LinkBroken as error:
            link, self._link = self._link, None
            self._context.channel.send(m.LinkDown(self._epoch, str(error)))
            if link is not None:
                link.close()
        finally:
            with self._changed:
                self._reading = False
                if live is not self._live and not live.sent:
                    log.warning("the weights of step %d are lost with the link: they have changed since", live.step)
                self._changed.notify_all()

    def _send(self, live: Publication) -> None:
        link, channel = self._link, self._context.channel
        assert link is not None
        started, before = time.time(), link.bytes_sent
        self._doing = "a weight id of the controller"
        answer = channel.request(m.NewWeightId(live.step), m.WeightId, timeout=self._seconds, what="a weight id")
        assert isinstance(answer, m.WeightId)
        self._doing = link.peer
        manifest = layout(self._model.canonical_metadata(), answer.weight_id, live.step)
        chunk = chunk_bytes(self._bytes, answer.relays, link.start_seconds, link.seconds_per_byte, self._most)
        began = time.monotonic()
        base_id = self._image.begin(link.weight_id) if self._image is not None else -1
        with link.closed_when(lambda: live.given_up or self._another_master()):
            link.send_bytes(encode_header(manifest, chunk, base_id))
            header = link.bytes_sent
            sums = self._send_buckets(link, live, chunk, base_id >= 0)
            less = self._bytes - (link.bytes_sent - header)
            link.send_bytes(encode_sums(sums))
        link.weight_id = answer.weight_id
        changed = self._image.complete(answer.weight_id) if self._image is not None else None
        if base_id < 0:  # else the pace was that of comparing
            link.sent(self._bytes, -(-self._bytes // chunk), time.monotonic() - began)
        now = time.time()
        self._context.trace.record("send", started, now, step=live.step, weight_id=answer.weight_id)
        channel.send(
            m.Published(
                answer.weight_id,
                live.step,
                live.stall_seconds,
                live.probe_seconds,
                now - started,
                link.bytes_sent - before,
                live.probe,
                now,
                link.bytes_sent - before + less,
                changed,
            )
        )
        self.weight_id = answer.weight_id
        with self._changed:
            live.sent = True
            self._changed.notify_all()

    @torch.no_grad()
    def _send_buckets(self, link: Link, live: Publication, chunk: int, as_changes: bool) -> list[tuple[int, int]]:
        """The live weights in buckets of `chunk` bytes, each packed while the other one is on its way; returns the sums of each tensor."""
        sums = [(0, 0)] * len(self._layout.tensors)
        on_the_way: deque[list[tuple[dist.Work, torch.Tensor]]] = deque()  # of the last two buckets
        self._exchange.word(-chunk)
        cut = chunks(self._layout, chunk)
        for number, parts in enumerate(cut):
            for sent in on_the_way.popleft() if len(on_the_way) == 2 else []:
                link.finish(*sent)
            self._exchange.word(number)
            bucket = self._buckets[number % 2][: min(chunk, self._bytes - number * chunk)]
            read = self._model.pack(parts, bucket)
            if bucket.is_cuda:
                torch.cuda.current_stream().synchronize()
            if number == len(cut) - 1:
                self._all_read(live)
            if as_changes:
                assert self._image is not None
                taken = read()  # while the bucket is whole
                on_the_way.append([(link.post_send(each), each) for each in self._image.take(number * chunk, bucket, True) or ()])
            else:
                on_the_way.append([(link.post_send(bucket), bucket)])
                taken = read()
                if self._image is not None:
                    self._image.take(number * chunk, bucket, False)
            for part, both in zip(parts, taken, strict=True):
                sums[part.tensor] = add_sums([sums[part.tensor], both])
        for sent in [each for posted in on_the_way for each in posted]:
            link.finish(*sent)
        return sums

    def _all_read(self, live: Publication) -> None:
        with self._changed:
            live.read, self._reading = True, False
            self._stood_still(live)
            fenced = live.fenced
            self._changed.notify_all()
        if fenced:
            self._release(live)

    def _stood_still(self, live: Publication) -> None:
        """With the lock: the trainer goes on."""
        if live.waiting_since is not None:
            live.stall_seconds += time.monotonic() - live.waiting_since
            live.waiting_since = None

    def _release(self, live: Publication) -> None:
        self._exchange.word(_RELEASE)
        with self._changed:
            self._let_go(live)

    def _let_go(self, live: Publication) -> None:
        """With the lock: the weights may change."""
        if not live.read:
            log.warning("the weights of step %d were not published: no link to a relay took them; the next ones go out", live.step)
        if self._live is live:
            self._live = None
        self._changed.notify_all()
