"""SGLang's own loop with overlap on, over a device that runs what is launched only when somebody waits for
it, as a GPU may: a forward pass is in flight while weights are loaded into a paused engine."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from laminar_hpc.engine.sglang.plugin.platform import activate
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.slots import SlotWriter

activate()  # before SGLang is imported, as its own processes do

from sglang.srt.managers.scheduler import Scheduler  # noqa: E402

from laminar_hpc.engine.sglang.plugin import port, protocol  # noqa: E402

LAYERS = ("first", "second")


class LazyDevice:
    """Runs what was launched, in order, when it is synchronized or when a result is asked for."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        while self.launched:
            self.launched.pop(0)()


class Batch:
    """A decode batch: the ids of the weights that each layer had when the device ran it."""

    forward_mode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: True)
    is_extend_in_batch = False
    spec_algorithm = SimpleNamespace(is_none=lambda: True)

    def copy(self) -> "Batch":
        return self


class OverlappedScheduler(Scheduler):
    """SGLang's loop and its pause; what a turn receives is scripted, its forward pass is the lazy
    device's."""

    def __init__(self, turns: list[Callable[["OverlappedScheduler"], None]]) -> None:
        self.turns, self.device_module = turns, LazyDevice()
        self.weights = {name: torch.zeros(8) for name in LAYERS}
        self.results: list[list[float]] = []
        self.gracefully_exit = self._engine_paused = self.require_mlp_sync = False
        self.enable_overlap, self.enable_unified_memory, self.is_generation = True, False, False
        self.running_batch = self.last_batch = None

    def ingest_requests(self) -> None:
        self.turns.pop(0)(self)
        self.gracefully_exit = not self.turns

    def get_next_batch_to_run(self, running_batch: object, last_batch: object) -> SimpleNamespace:
        return SimpleNamespace(running_batch=running_batch, batch_to_run=Batch())

    def run_batch(self, batch: Batch) -> list[float]:
        result: list[float] = []
        for name in LAYERS:
            self.device_module.launched.append(
                lambda name=name: result.append(self.weights[name].mean().item())
            )
        return result

    def process_batch_result(self, batch: Batch, result: list[float]) -> None:
        while len(result) < len(LAYERS):
            self.device_module.launched.pop(0)()
        self.results.append(result)

    def _apply_war_barrier(self) -> None: ...

    def _record_scheduler_state_for_paused_engine(self) -> None: ...


def test_a_forward_pass_in_flight_has_the_weights_that_it_was_launched_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise (pipeline.keep_kv): a paused engine takes new weights between two forward passes, never under
    one. Turns: two forwards, a pause in place, a load of weights of ones, going on."""
    writer = SlotWriter(str(tmp_path), "run", 1, tmp_path)
    manifest = layout([(name, (8,), torch.float32) for name in LAYERS], 1, 1)
    data = torch.from_numpy(writer.begin(manifest))
    for entry in manifest.tensors:
        data[entry.offset : entry.offset + entry.nbytes] = torch.ones(8).view(torch.uint8)
        entry.sum_words, entry.sum_indexed = tensor_sums(torch.ones(8))
    slot = writer.commit(manifest)

    def views(scheduler: OverlappedScheduler) -> list[LocalSlice]:
        return [LocalSlice(name, (8,), 0, 0, 8, tensor) for name, tensor in scheduler.weights.items()]

    monkeypatch.setattr(port, "_views", views)
    replies = []

    def load(scheduler: OverlappedScheduler) -> None:
        replies.append(port.load_weights(scheduler, protocol.LoadWeights(str(slot), paused=True)))
        assert [tensor.mean().item() for tensor in scheduler.weights.values()] == [1.0, 1.0]

    def pause(scheduler: OverlappedScheduler) -> None:
        scheduler.pause_generation(SimpleNamespace(mode="in_place"))
        assert scheduler.device_module.launched, "a forward pass is in flight, or the test proves nothing"

    def go_on(scheduler: OverlappedScheduler) -> None:
        scheduler._engine_paused = False

    def nothing(scheduler: OverlappedScheduler) -> None: ...

    scheduler = OverlappedScheduler([nothing, nothing, pause, load, go_on, nothing])
    Scheduler.event_loop_overlap(scheduler)
    scheduler.device_module.synchronize()
    assert isinstance(replies[0], protocol.LiveSums)
    assert scheduler.results == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    writer.close()
