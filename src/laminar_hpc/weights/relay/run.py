"""The relay rank: receives every publication into a slot of its machine's shared memory and passes it on down
the chain.

Only after the sums of all tensors equal the sender's is a slot committed and RelayHas sent: rollouts never
see anything else. With lanes a relay has a part of every publication, and the slot is committed with the last
part. A broken link ends the reception (the slot stays invisible) and is reported; the controller then has the
neighbours of the break linked, and whoever misses the newest weights gets them from the relay before it.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laminar_hpc.config.adapter_places import slots_of
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.address import own_address
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.chain import (
    CutLink,
    EpochProposed,
    JoinEpoch,
    LinkDown,
    RelayHas,
    SendAgain,
    StoreOpened,
)
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.line.messages.parking import HandOn, Keep, Park, Unpark
from laminar_hpc.line.messages.places import GateAddress, GateOpened, JoinGate, OpenGate
from laminar_hpc.machine.numa import stay_near
from laminar_hpc.weights.adapters import side_files
from laminar_hpc.weights.lane_slots import LaneWriter
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import MEET_SECONDS, LinkBroken, host_store, reach_store
from laminar_hpc.weights.links.streams import streams_of
from laminar_hpc.weights.links.transport import HOST
from laminar_hpc.weights.manifest import Manifest
from laminar_hpc.weights.places.far_link import FarLink
from laminar_hpc.weights.places.gate import Gate
from laminar_hpc.weights.relay.chain import Changes, StreamDamaged, WeightStream, receive_stream
from laminar_hpc.weights.relay.ends import DownstreamEnd, UpstreamEnd
from laminar_hpc.weights.relay.parking import ParkingLot
from laminar_hpc.weights.slots import SlotReader, SlotsBusy, SlotWriter
from laminar_hpc.weights.stream import decode_header

log = logging.getLogger(__name__)
_WAIT_SECONDS = 1.0
# a publication may be long in coming; a neighbour that dies, or `close`, ends the wait at once
_IDLE_SECONDS = 30 * 86400.0
_POLL_SECONDS = 0.02  # between two looks for a slot that nobody reads
_MAX_WRONG = 2  # receptions in a row whose sums differ


def run(context: RoleContext) -> None:
    """Serves until the controller says Stop."""
    config = context.config.relay
    torch.set_num_threads(config.threads)
    name, model, side = (
        context.welcome.slots_name,
        Path(context.config.model.path),
        side_files(context.config),
    )
    slots = (config.shm_dir, name, slots_of(context.config), model)
    writer = (
        SlotWriter(*slots, side)
        if config.lanes == 1
        else LaneWriter(*slots, context.index % config.lanes, config.lanes, side)
    )
    relay, lot = Relay(context, writer), ParkingLot(context.config, context.channel.send)
    heard = relay.handlers | dict.fromkeys((Park, Keep, HandOn, Unpark), lot.arrived)
    try:
        relay.tell_newest()
        removed: Path | None = None
        while True:
            before, removed = removed, writer.removed()
            if before and removed:  # and no Stop has come, before which the controller may remove them
                raise LaminarError(
                    f"{removed} was removed while the run goes on (systemd does that at a logout, unless "
                    "RemoveIPC=no or `loginctl enable-linger`): go on with the same command and resume=auto"
                )
            message = context.channel.wait(*heard, timeout=_WAIT_SECONDS)
            if isinstance(message, Welcome):
                lot.forget()
            if message is not None:
                heard[type(message)](message)
    except StopReceived:
        return
    finally:
        lot.close()
        relay.close()
        if relay.gate is not None:
            relay.gate.close()
        writer.close()


class Relay:
    """At most two links, and the slot writer. Waits for nobody but the controller: the links' threads do
    everything else."""

    def __init__(self, context: RoleContext, writer: SlotWriter) -> None:
        self._context = context
        self._writer = writer
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available() and context.config.relay.transport != HOST
            else torch.device("cpu")
        )
        if self._device.type == "cuda":
            stay_near(streams_of(self._device).name)
        self._seconds = context.config.relay.publish_timeout_seconds
        self._address = own_address(context.config.cluster.host)
        self._upstream: UpstreamEnd | None = None
        self._joined_gate: GateAddress | None = None  # that the upstream end pulls from
        self._downstream: DownstreamEnd | None = None
        self._lock = threading.Lock()  # guards `_arriving`, and the slot that it is written to
        self._arriving: WeightStream | None = None
        self._base_slot: int | None = None  # kept while what arrives is put on top of it
        self._wrong = 0
        self.gate: Gate | None = None
        self.handlers: dict[type[Message], Callable[[Any], None]] = {
            EpochProposed: self.propose,
            JoinEpoch: self.join,
            CutLink: self.cut,
            SendAgain: self.send_again,
            Welcome: self.welcome_back,
            OpenGate: self.open_gate,
            JoinGate: self.join_gate,
        }

    # ---- called by the main thread -------------------------------------------------------------------------

    def propose(self, message: EpochProposed) -> None:
        """Links to a new neighbour downstream."""
        if self._downstream is not None:
            self._downstream.close()

        def make(given_up: Callable[[], bool]) -> Link:
            store, port = host_store(self._address, MEET_SECONDS)
            self._context.channel.send(StoreOpened(message.epoch, self._address, port))
            peer = f"relay {message.relays[0]}"
            return Link(
                store,
                message.epoch,
                0,
                True,
                peer,
                self._address,
                self._device,
                self._seconds,
                given_up=given_up,
                transport=self._context.config.relay.transport,
            )

        max_chunk = self._context.config.relay.chunk_megabytes << 20
        self._downstream = DownstreamEnd(
            message.epoch, make, self._down, self._failed, self._sent, len(message.relays), max_chunk
        )

    def join(self, message: JoinEpoch) -> None:
        """Links to a new neighbour upstream."""
        self._drop_upstream("another relay came before this one")

        def make(_: Callable[[], bool]) -> Link:
            store = reach_store(message.host, message.port, MEET_SECONDS)
            return Link(
                store, message.epoch, 0, False, message.peer, self._address, self._device, self._seconds
            )

        self._upstream = UpstreamEnd(message.epoch, make, self._down, self._failed, self._receive)

    def cut(self, message: CutLink) -> None:
        """Whoever sends here has been replaced: what was arriving never becomes visible."""
        if self._upstream is not None and self._upstream.epoch == message.epoch:
            self._drop_upstream("its sender was replaced")

    def send_again(self, message: SendAgain) -> None:
        """Those behind miss the newest weights: they get them from this relay's slot."""
        sender = self._downstream
        newest = self._writer.keep_newest()
        if newest is None or sender is None or sender.epoch != message.epoch:
            if newest is not None:
                self._writer.release(newest[0])
            return
        slot, manifest, data = newest
        log.info(
            "weight id %d goes again from slot %d to %d relays", manifest.weight_id, slot, message.relays
        )
        sender.relays = message.relays
        sender.put(
            WeightStream(manifest, torch.from_numpy(data)[: manifest.data_bytes], None, slot, complete=True)
        )

    def welcome_back(self, _: Welcome) -> None:
        """The controller had taken this relay for dead: it learns anew what is here, and has links made
        anew, but for one to a gate."""
        if self._downstream is not None:
            self._downstream.close()
        if self._joined_gate is None:
            self._drop_upstream("this relay is leaving the chain")
        self.tell_newest()

    def open_gate(self, _: OpenGate) -> None:
        """Relays of other places pull from this machine's slots from now on."""
        if self.gate is None:
            config, name = self._context.config, self._context.welcome.slots_name
            reader = SlotReader(config.relay.shm_dir, name)
            self.gate = Gate(self._address, config.relay.gate, reader, self._failed)
            address = self.gate.address
            log.info("relays of other places reach this one at %s:%d", address.host, address.port)
        self._context.channel.send(GateOpened(self.gate.address))

    def join_gate(self, message: JoinGate) -> None:
        """Pulls from a gate; what is on its way from the same one goes on."""
        there = self._upstream
        if there is not None and self._joined_gate == message.address and not there.closed:
            there.epoch = message.epoch
            return
        self._drop_upstream("a gate came before this one")
        self._joined_gate = message.address

        def make(_: Callable[[], bool]) -> Link:
            place = self._context.config.cluster.place
            return FarLink(message.address, message.epoch, message.peer, place, self._writer.newest_id)

        self._upstream = UpstreamEnd(message.epoch, make, self._down, self._failed, self._receive)

    def tell_newest(self) -> None:
        """What is here already: with lanes, the other relays of a machine keep its slots while one starts
        anew."""
        newest = self._writer.keep_newest()
        if newest is not None:
            slot, manifest, _ = newest
            complete = self._writer.is_complete(slot)
            self._writer.release(slot)
            self._context.channel.send(
                RelayHas(manifest.weight_id, manifest.step, 0, 0.0, time.time(), complete=complete)
            )

    def close(self) -> None:
        self._drop_upstream("this relay is leaving the chain")
        if self._downstream is not None:
            self._downstream.close()
        self._downstream = None

    def _drop_upstream(self, why: str) -> None:
        """Closes the link; what was arriving over it is given up. Its thread may sit in its last operation
        for a while (gloo does not wake one whose message was cut in the middle), but nothing is written any
        more by then."""
        if self._upstream is not None:
            self._upstream.close()
        self._upstream = None
        self._joined_gate = None
        with self._lock:
            if self._arriving is not None:
                self._arriving.broke(why)
                self._let_go()

    def _let_go(self) -> None:
        """With the lock: of the slot that is written, and of the one that it is made from."""
        self._arriving = None
        self._writer.abandon()
        if self._base_slot is not None:
            self._writer.release(self._base_slot)
            self._base_slot = None

    # ---- called by the links' threads ----------------------------------------------------------------------

    def _down(self, epoch: int, why: str) -> None:
        log.warning("link %d: %s", epoch, why)
        self._context.channel.send(LinkDown(epoch, why))

    def _failed(self, error: Exception) -> None:
        log.error("a link's thread failed", exc_info=error)
        self._context.channel.interrupt(error)

    def _sent(self, stream: WeightStream) -> None:
        self._writer.release(stream.slot)

    def _receive(self, link: Link) -> None:
        """One publication, from its header to RelayHas. Raises LaminarError when what comes is again and
        again not what was sent."""
        manifest, chunk, base_id = decode_header(link.receive_bytes(idle_seconds=_IDLE_SECONDS))
        started = time.time()
        stream = self._into_a_slot(link, manifest, chunk, base_id)
        try:
            receive_stream(link, stream)
            with self._lock:
                if self._arriving is not stream:
                    raise LinkBroken(f"the link to {link.peer} was replaced")
                complete = self._writer.commit(manifest) is not None
            if complete and self.gate is not None:
                self.gate.look()
            self._wrong = 0
        except StreamDamaged as error:
            self._wrong += 1
            if self._wrong >= _MAX_WRONG:
                raise
            raise LinkBroken(str(error)) from None
        finally:
            with self._lock:
                if self._arriving is stream:
                    self._let_go()
        now = time.time()
        self._context.trace.record(
            "relay", started, now, weight_id=manifest.weight_id, bytes=manifest.data_bytes
        )
        self._context.channel.send(
            RelayHas(
                manifest.weight_id,
                manifest.step,
                manifest.data_bytes,
                now - started,
                now,
                stream.passed_on,
                complete,
                link.wire_bytes,
            )
        )

    def _into_a_slot(self, link: Link, manifest: Manifest, chunk: int, base_id: int | None) -> WeightStream:
        """As soon as there is one: readers may hold all of them for a while. With lanes not even then, as
        those of newer ids stay taken. Raises LinkBroken after half of the time that the sender waits."""
        until = time.monotonic() + (self._seconds / 2 if self._context.config.relay.lanes == 1 else 0.0)
        while True:
            with self._lock:
                if link.closed:
                    raise LinkBroken(f"the link to {link.peer} was replaced")
                try:
                    base = self._base(manifest, base_id)
                    stream = self._arriving = self._begin(manifest, chunk)
                    if base_id is not None and base is not None:
                        stream.changes = Changes(base_id, torch.from_numpy(base)[: manifest.data_bytes])
                    self._pass_on(stream)
                    return stream
                except SlotsBusy as busy:
                    self._let_go()
                    if time.monotonic() > until:
                        raise LinkBroken(str(busy)) from None
                except LaminarError:
                    self._let_go()
                    raise
            time.sleep(_POLL_SECONDS)

    def _base(self, manifest: Manifest, base_id: int | None) -> np.ndarray | None:
        """The bytes that the changes to come are to, in a slot kept until `_let_go`; None for a stream in
        full. Raises LinkBroken without them: the relay before, or the trainer, sends in full over the next
        link."""
        if base_id is None:
            return None
        base = self._writer.keep(base_id)
        if base is None:
            raise LinkBroken(
                f"weight id {manifest.weight_id} came as changes to "
                f"weight id {base_id}, which is not here: it is due in full"
            )
        self._base_slot, data = base
        return data

    def _begin(self, manifest: Manifest, chunk: int) -> WeightStream:
        """A slot to receive into."""
        sender = self._downstream
        try:
            data = self._writer.begin(manifest)
        except SlotsBusy:
            if sender is None or not sender.busy:
                raise
            sender.break_off(f"it is more than {self._writer.count - 2} publications behind")
            data = self._writer.begin(manifest)
        return WeightStream(manifest, torch.from_numpy(data)[: manifest.data_bytes], chunk)

    def _pass_on(self, stream: WeightStream) -> None:
        """Goes on downstream as it comes."""
        sender = self._downstream
        if sender is not None:
            stream.slot = self._writer.keep_held()
            stream.passed_on = sender.epoch
            sender.put(stream)
