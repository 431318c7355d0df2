"""The relay rank: receives every publication into a slot of its machine's shared memory, passes it on down the chain, checks the sums.

Only after the sums of all tensors equal those of the manifest is a slot committed and RelayHas sent: rollouts never see anything else. A
broken link ends the reception (the slot stays invisible) and is reported; the controller then forms a new epoch.
"""

import logging
import time
from pathlib import Path

import msgspec
import torch

from laminar_hpc import messages as m
from laminar_hpc.cluster.channel import StopReceived
from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.cluster.links import Link, LinkBroken, own_address, reach_store
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.manifest import Manifest, decode_manifest, encode_manifest
from laminar_hpc.weights.slots import SlotWriter
from laminar_hpc.weights.stream import receive_sums
from laminar_hpc.weights.sums import tensor_sums

log = logging.getLogger(__name__)
_WAIT_SECONDS = 1.0


def run(context: RoleContext) -> None:
    """Serves until the controller says Stop."""
    torch.set_num_threads(context.config.relay.threads)
    writer = SlotWriter(context.config.relay.shm_dir, context.welcome.run_id, context.config.relay.slots, Path(context.config.model.path))
    relay = Relay(context, writer)
    try:
        while True:
            message = context.channel.wait(m.JoinEpoch, m.Receive, timeout=_WAIT_SECONDS)
            if isinstance(message, m.JoinEpoch):
                relay.join(message)
            elif isinstance(message, m.Receive):
                relay.receive(message)
    except StopReceived:
        return
    finally:
        writer.close()


class Relay:
    """The links of the current epoch and the slot writer."""

    def __init__(self, context: RoleContext, writer: SlotWriter) -> None:
        self._context, self._writer = context, writer
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._chunk = context.config.relay.chunk_megabytes << 20
        self._epoch = 0
        self._upstream: Link | None = None
        self._downstream: Link | None = None

    def join(self, message: m.JoinEpoch) -> None:
        """Makes this relay's one or two links; first the one it receives on."""
        seconds = self._context.config.relay.publish_timeout_seconds
        address = own_address(self._context.config.cluster.host)
        self._epoch, self._upstream, self._downstream = message.epoch, None, None
        position = message.position
        try:
            store = reach_store(message.host, message.port, seconds)
            before = "the trainer" if position == 1 else f"chain member {position - 1}"
            self._upstream = Link(store, message.epoch, position - 1, False, before, address, self._device, seconds)
            if position < message.length:
                self._downstream = Link(
                    store, message.epoch, position, True, f"chain member {position + 1}", address, self._device, seconds
                )
        except LinkBroken as error:
            self._down(error)

    def _down(self, error: LinkBroken) -> None:
        self._upstream = self._downstream = None
        self._writer.abandon()
        self._context.channel.send(m.LinkDown(self._epoch, str(error)))

    def receive(self, message: m.Receive) -> None:
        """One publication, from the manifest to RelayHas. Raises LaminarError when what came is not what was sent."""
        if self._upstream is None or message.epoch != self._epoch:
            return
        started = time.time()
        try:
            manifest = self._receive_manifest(self._upstream, message.weight_id)
            data = torch.from_numpy(self._writer.begin(manifest))
            self._receive_data(self._upstream, data[: manifest.data_bytes])
            receive_sums(self._upstream, self._downstream, manifest)
        except LinkBroken as error:
            self._down(error)
            return
        self._check(manifest, data)
        self._writer.commit(manifest)
        now = time.time()
        self._context.trace.record("relay", started, now, weight_id=manifest.weight_id, bytes=manifest.data_bytes)
        self._context.channel.send(m.RelayHas(manifest.weight_id, manifest.step, manifest.data_bytes, now - started, now))

    def _receive_manifest(self, upstream: Link, weight_id: int) -> Manifest:
        frame = upstream.receive_bytes()
        try:
            manifest = decode_manifest(frame)
        except msgspec.MsgspecError as error:
            raise LaminarError(f"relay {self._context.index}: what came from {upstream.peer} is no manifest ({error})") from None
        if manifest.weight_id != weight_id:
            raise LinkBroken(f"{upstream.peer} sends weight id {manifest.weight_id}, {weight_id} was announced")
        if self._downstream is not None:
            self._downstream.send_bytes(encode_manifest(manifest))
        return manifest

    def _receive_data(self, upstream: Link, data: torch.Tensor) -> None:
        """Chunk by chunk, each passed on before the next one is taken."""
        for first in range(0, data.numel(), self._chunk):
            part = data[first : first + self._chunk]
            chunk = upstream.receive(part if self._device.type == "cpu" else torch.empty_like(part, device=self._device))
            if self._downstream is not None:
                self._downstream.send(chunk)
            if chunk is not part:
                part.copy_(chunk)

    def _check(self, manifest: Manifest, data: torch.Tensor) -> None:
        for entry in manifest.tensors:
            if tensor_sums(data[entry.offset : entry.offset + entry.nbytes]) != (entry.sum_words, entry.sum_indexed):
                self._writer.abandon()
                raise LaminarError(
                    f"relay {self._context.index}: tensor {entry.name} of weight id {manifest.weight_id} arrived with other sums "
                    "than it was sent with; "
                    "check the network and memory of this machine"
                )
