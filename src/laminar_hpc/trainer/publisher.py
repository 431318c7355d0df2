"""Publishing: the trainer's live weights leave for the master relay while the trainer goes on.

`publish` packs the canonical tensors into a staging buffer (the stall), and a thread of its own asks for a weight id, sends and
reports. Two buffers: if a newer publication is ready while one is on its way, it takes the place of any that waits; skipping an id is
legal. The thread also makes the link to the master relay for every epoch of the membership that the controller proposes.

Used by `trainer.loop` (publish, fence, close); collective over the trainer world. Rank 0 gathers what the others hold, and sends all.
"""

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from laminar_hpc import messages as m
from laminar_hpc.cluster.channel import StopReceived
from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.cluster.links import Link, LinkBroken, host_store, own_address
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.kernels import Sums
from laminar_hpc.policies.chain import chunk_bytes
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.stream import encode_header, encode_sums

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2


class Publishable(Protocol):
    """What the publisher needs of the policy."""

    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]: ...
    def pack(self, bucket: torch.Tensor | None) -> Sums: ...
    def probe_logprobs(self) -> list[float]: ...


@dataclass
class Staged:
    """A complete copy of the weights of one step, ready to be sent."""

    step: int
    buffer: torch.Tensor  # uint8, on the sending device
    sums: Sums  # of its tensors
    probe: list[float]
    stall_seconds: float


class Publisher:
    def __init__(self, context: RoleContext, model: Publishable) -> None:
        self._context, self._model = context, model
        self._config = context.config
        self._lead = dist.get_rank() == 0
        self.weight_id = -1
        if not self._lead:
            return
        self._address = own_address(self._config.cluster.host)
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        size = layout(model.canonical_metadata(), 0, 0).data_bytes
        self._free = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._waiting: Staged | None = None
        self._sent: Staged | None = None  # the last one, kept for relays that come later
        self._epoch = 0
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._sending = self._closing = False
        self._link: Link | None = None
        self._stores: list = []  # kept alive: a link's store must outlive its epoch's members
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    # ---- called by the trainer -------------------------------------------------------------------------------------------------

    def publish(self, step: int) -> float:
        """Stages the live weights as those of step `step`; returns the seconds that the trainer stood still.

        Raises LaminarError if sending failed.
        """
        started = time.time()
        probe = self._model.probe_logprobs()
        if not self._lead:
            self._model.pack(None)  # sends what this rank holds
            return time.time() - started
        buffer = self._take_buffer()
        sums = self._model.pack(buffer)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
        stall = time.time() - started
        with self._changed:
            if self._waiting is not None:
                self._free.append(self._waiting.buffer)
            self._waiting = Staged(step, buffer, sums, probe, stall)
            self._changed.notify_all()
        return stall

    def _take_buffer(self) -> torch.Tensor:
        """A free buffer: with two of them there is always one that is not being sent."""
        with self._changed:
            self._raise()
            if self._free:
                return self._free.pop()
            if self._sent is not None:
                buffer, self._sent = self._sent.buffer, None
                return buffer
            assert self._waiting is not None
            buffer, self._waiting = self._waiting.buffer, None
            return buffer

    def fence(self) -> None:
        """Before the optimizer writes: nothing reads the live parameters any more, because they were staged.

        Raises if sending has failed.
        """
        if self._lead:
            with self._changed:
                self._raise()

    def close(self) -> None:
        """Waits until everything staged is with the master relay."""
        if not self._lead:
            return
        seconds = 2 * self._config.relay.publish_timeout_seconds
        deadline = time.monotonic() + seconds
        with self._changed:
            while (self._waiting or self._sending) and not self._error:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LaminarError(f"the last weights were not with the master relay after {seconds:.0f} s")
            self._closing = True
            self._changed.notify_all()
            self._raise()
        self._thread.join(5)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- the publisher's thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._follow_membership()
                staged = self._next()
                if staged is not None:
                    self._try_to_send(staged)
        except StopReceived:
            return
        except Exception as error:
            log.exception("publishing failed")
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _follow_membership(self) -> None:
        """Links to the master relay of the newest epoch; the leader's store listens on the run's address only."""
        proposed = self._context.channel.wait(m.EpochProposed, timeout=0)
        if proposed is None:
            return
        while (newer := self._context.channel.wait(m.EpochProposed, timeout=0)) is not None:
            proposed = newer
        assert isinstance(proposed, m.EpochProposed)
        seconds = self._config.relay.publish_timeout_seconds
        if self._link is not None:
            self._link.close()
        store, port = host_store(self._address, seconds)
        self._stores = [*self._stores[-1:], store]
        self._context.channel.send(m.StoreOpened(proposed.epoch, self._address, port))
        self._epoch, self._link = proposed.epoch, None
        newer_master = partial(self._context.channel.pending, m.EpochProposed)
        try:
            self._link = Link(
                store, proposed.epoch, 0, True, f"relay {proposed.relays[0]}", self._address, self._device, seconds, given_up=newer_master
            )
        except LinkBroken as error:
            self._context.channel.send(m.LinkDown(proposed.epoch, str(error)))
            return
        log.info("epoch %d: linked to relay %d", proposed.epoch, proposed.relays[0])
        with self._changed:
            if proposed.resend and self._waiting is None and self._sent is not None:
                self._waiting, self._sent = self._sent, None

    def _next(self) -> Staged | None:
        with self._changed:
            if self._waiting is None or self._link is None:
                self._changed.wait(_POLL_SECONDS)
                return None
            staged, self._waiting, self._sending = self._waiting, None, True
            return staged

    def _try_to_send(self, staged: Staged) -> None:
        """Sends; if the link breaks, these weights wait for the next epoch unless newer ones are there by then."""
        sent = True
        assert self._link is not None
        try:
            with self._link.closed_when(partial(self._context.channel.pending, m.EpochProposed)):  # another master: this one is stuck
                self._send(staged)
        except LinkBroken as error:
            self._context.channel.send(m.LinkDown(self._epoch, str(error)))
            self._link.close()
            sent, self._link = False, None
        with self._changed:
            self._sending = False
            if self._sent is not None:
                self._free.append(self._sent.buffer)
                self._sent = None
            if sent:
                self._sent = staged
            elif self._waiting is None:
                self._waiting = staged
            else:
                self._free.append(staged.buffer)
            self._changed.notify_all()

    def _send(self, staged: Staged) -> None:
        assert self._link is not None
        channel, started = self._context.channel, time.time()
        answer = channel.request(
            m.NewWeightId(staged.step), m.WeightId, timeout=self._config.relay.publish_timeout_seconds, what="a weight id"
        )
        assert isinstance(answer, m.WeightId)
        link, most = self._link, self._config.relay.chunk_megabytes << 20
        manifest = layout(self._model.canonical_metadata(), answer.weight_id, staged.step)
        size = manifest.data_bytes
        chunk = chunk_bytes(size, answer.relays, link.start_seconds, link.seconds_per_byte, most)
        began = time.monotonic()
        link.send_bytes(encode_header(manifest, chunk))
        for first in range(0, size, chunk):
            link.send(staged.buffer[first : first + chunk])
        link.send_bytes(encode_sums(staged.sums()))
        link.sent(size, -(-size // chunk), time.monotonic() - began)
        now = time.time()
        self._context.trace.record("send", started, now, step=staged.step, weight_id=answer.weight_id)
        channel.send(
            m.Published(answer.weight_id, staged.step, staged.stall_seconds, now - started, manifest.data_bytes, staged.probe, now)
        )
        self.weight_id = answer.weight_id
