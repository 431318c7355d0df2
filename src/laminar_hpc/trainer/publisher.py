"""Publishing: the trainer's live weights leave for the master relay while the trainer goes on.

    trainer    publish(s) | forward, backward of step s ......... | fence() | optimizer.step | publish(s + 1)
    publisher             | id, then bucket by bucket: pack, send | tail: the last buckets, the sums |

Each is a thread. `publish` only hands over; the publisher's thread reads the live parameters into two buckets
in turn, of relay.chunk_megabytes at most, on the sending device: one is packed while the other is on its way.
`fence`, before the parameters change, waits until they are all read. With a relay that does not take them it
waits relay.publish_timeout_seconds at most; then, or without a link, these weights are given up: skipping an
id is legal, the next ones go out. Until the fence, a broken link's weights are sent again as soon as there is
a new epoch.

Every trainer rank that holds slices, or sends a lane, has such a thread. Rank 0's decides, and says by one
word per bucket what the others do: all lanes' buckets of one number are packed and sent before those of the
next. Used by `trainer.loop` (publish, fence, close).
"""

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from laminar_hpc import messages as m
from laminar_hpc.cluster.channel import StopReceived
from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.policies.chain import chunk_bytes
from laminar_hpc.trainer.canonical import TensorSums
from laminar_hpc.trainer.exchange import Exchange
from laminar_hpc.trainer.lanes import LaneSender
from laminar_hpc.weights.lanes import Lane, lane_chunks, lane_manifest
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.stream import Part

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
# Words beside the numbers of buckets; any other one below 0 is the size of the buckets that follow, with the
# weight id as the next word.
_WAIT, _RELEASE, _STATE, _END = -1, -2, -3, -4


class Publishable(Protocol):
    """What the publisher needs of the policy."""

    device: torch.device

    @property
    def publishing(self) -> Exchange: ...
    @property
    def lanes(self) -> list[Lane]: ...
    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]: ...
    def pack(self, parts: Sequence[Part], bucket: torch.Tensor | None, lane: int) -> TensorSums: ...
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
        self._lead, self._exchange, rank = dist.get_rank() == 0, model.publishing, dist.get_rank()
        self._holder = rank in self._exchange.ranks
        self._shared = any(lane.sender != 0 for lane in model.lanes)  # other ranks send as well
        self.weight_id = -1
        self._live: Publication | None = None
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._doing = "nothing"  # of the thread, for errors
        self._closing = self._reading = False
        self._mine: list[LaneSender] = []  # the lanes that this rank sends
        if not self._holder:
            return
        self._most = self._config.relay.chunk_megabytes << 20
        whole = layout(model.canonical_metadata(), 0, 0)
        self._mine = [
            LaneSender(context, lane, number, whole, model.device, self._seconds)
            for number, lane in enumerate(model.lanes)
            if lane.sender == rank
        ]
        self._proposed: dict[int, m.EpochProposed] = {}  # by lane, the newest that is not followed yet
        self._proposals = threading.Lock()
        self._resend = False  # a new link of this rank's wants what was sent last
        if self._lead and len(model.lanes) > 1:
            context.channel.send(m.LaneSenders([lane.sender for lane in model.lanes]))
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    # ---- called by the trainer -----------------------------------------------------------------------------

    def publish(self, step: int) -> None:
        """The live weights are those of step `step`. Collective, for the probe. Raises LaminarError if
        publishing failed, or when the probe's log-probs are not finite.

        With relay.publish=blocking rank 0 stands still here until they are read, for
        relay.publish_timeout_seconds at most.
        """
        self.fence()
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

        Raises LaminarError if publishing has failed, or names who holds up the thread that reads when it does
        not let go.
        """
        self._await_release(self._seconds if self._mine else 3 * self._seconds)

    def close(self) -> None:
        """Waits until the last weights are with the master relay. Raises LaminarError when they are not in
        time."""
        with self._changed:
            live = self._live
            if self._lead and live is not None and not self._wait_until(lambda: live.sent, 2 * self._seconds):
                raise LaminarError(
                    "the last weights were not with the master relay after "
                    f"{2 * self._seconds:.0f} s; it waits for {self._doing}"
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
            if (
                self._lead
                and len(self._exchange.ranks) == 1
                and not self._reading
                and (live.read or not self._linked)
            ):
                self._let_go(live)
            if self._wait_until(lambda: self._live is not live, seconds):
                return
            log.warning(
                "the weights of step %d are given up after %.0f s: %s does not take them",
                live.step,
                seconds,
                self._doing,
            )
            live.given_up = True
            self._changed.notify_all()
            if not self._wait_until(lambda: self._live is not live, self._seconds):
                who = self._doing if self._lead else "trainer 0"
                raise LaminarError(
                    "publishing has not let go of the weights of step "
                    f"{live.step} for {seconds:.0f} s: it waits for {who}"
                )

    def _wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """With the lock: whether it came true within `seconds`. Raises if publishing failed; nothing is
        awaited of a thread that ended."""
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

    # ---- the publisher's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._model.device.type == "cuda":
                torch.cuda.set_device(self._model.device)
                torch.cuda.set_stream(torch.cuda.Stream())
            while not self._closing:
                self._follow_membership()
                if self._lead:
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

    # ---- links ---------------------------------------------------------------------------------------------

    @property
    def _linked(self) -> bool:
        """All lanes of this rank."""
        return all(lane.link is not None for lane in self._mine)

    def _take_proposals(self) -> None:
        """From any thread. Raises StopReceived, and what else came in place of a message."""
        while (proposed := self._context.channel.wait(m.EpochProposed, timeout=0)) is not None:
            assert isinstance(proposed, m.EpochProposed)
            with self._proposals:
                lane = proposed.epoch % len(self._model.lanes)
                self._proposed[lane] = max(
                    proposed, self._proposed.get(lane, proposed), key=lambda p: p.epoch
                )

    def _another_master(self, lane: LaneSender) -> bool:
        """The controller wants another link in place of this lane's, or has sent what ends the publisher's
        thread."""
        try:
            self._take_proposals()
        except Exception:
            return True
        return lane.number in self._proposed

    def _follow_membership(self) -> None:
        """Links to the master relays of the newest epochs."""
        if self._mine:
            self._take_proposals()
        for lane in self._mine:
            with self._proposals:
                proposed = self._proposed.pop(lane.number, None)
            if proposed is None:
                continue
            self._doing = f"relay {proposed.relays[0]} to link"
            lane.follow(proposed, functools.partial(self._another_master, lane))
            if lane.link is not None and proposed.resend:
                self._resend = True

    # ---- another rank than 0 -------------------------------------------------------------------------------

    def _follow_the_lead(self) -> None:
        """Another rank: its slices and lanes of each bucket that rank 0 names, until the weights are
        released."""
        with self._changed:
            live = self._live
            if live is None:
                self._changed.wait(_POLL_SECONDS)
                return
        unfinished = False
        while (word := self._exchange.word()) != _RELEASE:
            if word == _STATE:
                self._follow_membership()
                self._state()
            elif word == _END:
                unfinished = False
                self._end()
            elif word >= 0:
                self._pack(word)
            elif word != _WAIT:
                self._begin(
                    live, layout(self._model.canonical_metadata(), self._exchange.word(), live.step), -word
                )
                unfinished = self._shared
        with self._changed:
            self._live = None
            self._changed.notify_all()
        if unfinished:
            self._end()

    # ---- what all ranks do ---------------------------------------------------------------------------------

    def _state(self) -> tuple[bool, bool]:
        """Whether all lanes of all ranks have a link, and whether a new one wants what was sent last."""
        said = self._exchange.all_say([self._linked, self._resend])
        self._resend = False
        return all(linked for linked, _ in said), any(resend for _, resend in said)

    def _begin(self, live: Publication, manifest: Manifest, chunk: int) -> None:
        self._cut = [
            lane_chunks(lane_manifest(manifest, lane.begin, lane.end), chunk) for lane in self._model.lanes
        ]
        for lane in self._mine:
            lane.begin(manifest, chunk, functools.partial(self._unwanted, live, lane))

    def _unwanted(self, live: Publication, lane: LaneSender) -> bool:
        return live.given_up or self._another_master(lane)

    @torch.no_grad()
    def _pack(self, number: int) -> None:
        """Bucket `number` of every lane: this rank's slices to its sender, or all of it into a bucket that is
        then on its way."""
        mine = {lane.number: lane for lane in self._mine}
        for lane, cut in enumerate(self._cut):
            if number >= len(cut):
                continue
            if lane not in mine:
                self._model.pack(cut[number], None, lane)
                continue
            bucket = mine[lane].bucket()
            mine[lane].post(bucket, cut[number], self._model.pack(cut[number], bucket, lane))

    def _end(self) -> tuple[bool, int, int, float | None]:
        """Of all lanes of all ranks: whether all is sent, the bytes that left for relays, those that would
        have left in full, and the fraction of elements that changed, None if that is not known of all."""
        for lane in self._mine:
            lane.end()
        mine = [[lane.sent, lane.bytes_sent, lane.full_bytes, *lane.bytes_changed] for lane in self._mine]
        said = (
            self._exchange.all_say([sum(each) for each in zip(*mine, strict=True)] or [0] * 5)
            if self._shared
            else mine
        )
        sent, count, full, known, changed = (sum(each) for each in zip(*said, strict=True))
        lanes = self._model.lanes
        return sent == len(lanes), count, full, changed / lanes[-1].end if known == len(lanes) else None

    # ---- rank 0 --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Sends, releases or waits, whichever is due."""
        with self._changed:
            live = self._live
            if live is not None and self._resend and not self._shared:
                live.sent, self._resend = False, False
            due = live is not None and not live.sent and self._linked
            if due and not self._shared:
                live.read, self._reading = False, True
            if live is None or not (due or live.fenced):
                self._doing = "nothing" if self._linked else "a relay to join"
                self._changed.wait(_POLL_SECONDS)
        if live is None:
            return
        if self._shared:
            due = self._others_ready(live)
        if due:
            self._try_to_send(live)
        elif live.fenced:
            self._release(live)
        elif not self._shared:
            self._exchange.word(_WAIT)

    def _others_ready(self, live: Publication) -> bool:
        """Whether all lanes of all ranks have links, and something to send."""
        self._exchange.word(_STATE)
        linked, resend = self._state()
        with self._changed:
            live.sent = live.sent and not resend
            if linked and not live.sent:
                live.read, self._reading = False, True
            elif not linked and not live.fenced:
                self._doing = "a relay to join"
                self._changed.wait(_POLL_SECONDS)
        return linked and not live.sent

    def _try_to_send(self, live: Publication) -> None:
        try:
            self._send(live)
        finally:
            with self._changed:
                self._reading, live.read = False, live.read and live.sent
                if live is not self._live and not live.sent:
                    log.warning(
                        "the weights of step %d are lost with a link: they have changed since", live.step
                    )
                self._changed.notify_all()

    def _send(self, live: Publication) -> None:
        channel = self._context.channel
        started = time.time()
        self._doing = "a weight id of the controller"
        answer = channel.request(
            m.NewWeightId(live.step), m.WeightId, timeout=self._seconds, what="a weight id"
        )
        assert isinstance(answer, m.WeightId)
        first = self._mine[0].link
        if first is None:
            return
        self._doing = self._mine[0].peer
        size = max(lane.end - lane.begin for lane in self._model.lanes)
        chunk = chunk_bytes(size, answer.relays, first.start_seconds, first.seconds_per_byte, self._most)
        for word in (-chunk, answer.weight_id):
            self._exchange.word(word)
        self._begin(live, layout(self._model.canonical_metadata(), answer.weight_id, live.step), chunk)
        buckets = max(len(cut) for cut in self._cut)
        for number in range(buckets):
            if not (self._shared or any(lane.link for lane in self._mine)):
                break  # nobody is left to send to
            self._exchange.word(number)
            self._pack(number)
            if number == buckets - 1:
                self._all_read(live)
        sent, count, full, changed = self._end()
        if not sent:
            return
        now = time.time()
        self._context.trace.record("send", started, now, step=live.step, weight_id=answer.weight_id)
        channel.send(
            m.Published(
                answer.weight_id,
                live.step,
                live.stall_seconds,
                live.probe_seconds,
                now - started,
                count,
                live.probe,
                now,
                full,
                changed,
            )
        )
        self.weight_id = answer.weight_id
        with self._changed:
            live.sent = True
            self._changed.notify_all()

    def _all_read(self, live: Publication) -> None:
        with self._changed:
            live.read, self._reading = True, False
            self._stood_still(live)
            fenced = live.fenced
            self._changed.notify_all()
        if fenced:
            self._release(live)
        elif self._shared:
            self._exchange.word(_END)

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
            log.warning(
                "the weights of step %d were not published: "
                "no link to a relay took them; the next ones go out",
                live.step,
            )
        if self._live is live:
            self._live = None
        self._changed.notify_all()
