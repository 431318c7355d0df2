"""A rank of a trainer world with a fake GPU (links/fake_device.py); called by name through ranks.py."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.links.fake_device import LazyDevice, used
from helpers.trainer import publishing
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.publication import NewWeightId
from laminar_hpc.trainer.canonical.exchange import Exchange
from laminar_hpc.trainer.canonical.gather import Canonical
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import LazySums
from laminar_hpc.weights.lanes import Lane
from laminar_hpc.weights.stream import TensorSpan

ROWS, COLUMNS = 16, 512  # of a tensor that each rank holds


class Rows:
    """Satisfies Publishable: `tensors` of which each rank holds as many rows, and no model."""

    device = torch.device("cpu")

    def __init__(self, lanes: int, tensors: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        shape = (world * ROWS, COLUMNS)
        wholes = [torch.arange(shape[0] * shape[1]).view(shape) + 0.5 * number for number in range(tensors)]
        self.first = b"".join(whole.float().numpy().tobytes() for whole in wholes)  # of all ranks
        self.held = [whole.float()[rank * ROWS : (rank + 1) * ROWS].clone() for whole in wholes]
        self._slices = [
            LocalSlice(f"tensor{number}", shape, 0, rank * ROWS, ROWS, view)
            for number, view in enumerate(self.held)
        ]
        self._canonical = Canonical(self._slices, torch.float32, lanes, 30.0, 30.0)

    @property
    def now(self) -> bytes:
        """The bytes of a world of one rank."""
        return b"".join(view.numpy().tobytes() for view in self.held)

    @property
    def publishing(self) -> Exchange:
        return self._canonical.publishing

    @property
    def lanes(self) -> list[Lane]:
        return self._canonical.lanes

    def canonical_metadata(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return self._canonical.metadata(torch.float32)

    def keep_copy(self) -> None:
        self._canonical.keep(self._slices)

    def pack(self, spans: Sequence[TensorSpan], bucket: torch.Tensor | None, lane: int) -> LazySums:
        return self._canonical.pack(self._slices, torch.float32, spans, bucket, lane)

    def probe_logprobs(self) -> list[float]:
        return [0.0]


class Controller(publishing.Controller):
    """Gives a weight id once the trainer waits to change the weights, so that they are released as soon as
    they are read."""

    def told(self, name: str, message: Message) -> None:
        until = time.monotonic() + 20
        while isinstance(message, NewWeightId) and not self.publisher._handover.live.fenced:
            assert time.monotonic() < until, "the trainer does not wait"
            time.sleep(0.005)
        super().told(name, message)


def changed_as_soon_as_released(folder: str) -> dict[str, object]:
    """Two lanes, whose senders gather slices of the others; all change their weights behind the fence. Time
    passes for their devices only while their hosts wait for them."""
    rank, device = dist.get_rank(), LazyDevice(f"GPU-{dist.get_rank()}")
    config = RunConfig()
    config.relay.lanes, config.relay.publish_timeout_seconds = 2, 20.0
    config.relay.shm_dir = config.model.path = folder
    with used(device), groups_made() as backends:
        model = Rows(2, 1)  # the border of the lanes lies in the second rank's rows
        controller = Controller(config, Path(folder))
        publisher = publishing.Publisher(controller.context("trainer", rank, controller.trainer), model)
        controller.publisher = publisher
        for number, lane in enumerate(model.lanes):
            if lane.sender == rank:
                controller.link(controller.add_relay(number))
        publishing.linked(publisher)
        dist.barrier()
        publisher.publish(0)
        publisher.fence()
        for view in model.held:
            view += 1000
        slot = controller.wait_for_step(0, 0, 20)
        same = publishing.slot_bytes(slot) == model.first
        dist.barrier()
        publisher.close()
        dist.barrier()
        controller.stop()
    return {"same": same, "senders": [lane.sender for lane in model.lanes], "backends": backends}


@contextlib.contextmanager
def groups_made() -> Iterator[list[str | None]]:
    """The backends that groups of torch.distributed are asked for in the block; None: the world's own."""
    asked, original = list[str | None](), dist.new_group

    def new_group(*args: object, backend: str | None = None, **more: object) -> object:
        asked.append(backend)
        return original(*args, backend=backend, **more)

    dist.new_group = new_group
    try:
        yield asked
    finally:
        dist.new_group = original
