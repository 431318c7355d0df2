"""How a replica of a run with model.lora gets newer weights: the slot's adapter beside those that the engine
has, verified as full weights are, with a proof that it acts; then those go that nothing needs.

Used by worker.py in place of WeightLoader. The engine has the model itself from model.path, as the trainer
has; it is started anew only where a load failed.
"""

import statistics
from collections.abc import Collection
from pathlib import Path

from laminar_hpc.config.adapters import adapter_tensors, widths_of
from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import BASE, Sums, TensorLayout
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.weight_loader import (
    PullClock,
    SlotRefused,
    WeightLoader,
    check_file,
    check_layout,
)
from laminar_hpc.weights.manifest import Manifest
from laminar_hpc.weights.slots import SlotHandle, SlotReader


class AdapterLost(SlotRefused):
    """The engine holds the trainer's adapter and computes as if it had none."""


def check_acts(engine: str, logprobs: list[float], base: list[float], manifest: Manifest) -> float:
    """The mean difference, in nats, that the adapter makes to the probe's log-probs. Raises AdapterLost where
    it makes none though its B is not zero."""
    if not logprobs:  # an emulated engine scores nothing
        return 0.0
    moved = statistics.fmean(abs(a - b) for a, b in zip(logprobs, base, strict=True))
    if moved == 0.0 and any(t.sum_words for t in manifest.tensors if ".lora_B." in t.name):
        raise AdapterLost(
            f"{engine} holds the adapter of weight id {manifest.weight_id} bit for bit, and its log-probs of "
            "the fixed probe are those of the model without it: the adapter does not act; look at "
            "rollout.engine_arguments"
        )
    return moved


class AdapterLoader(WeightLoader):
    """As WeightLoader. `several`: adapters stay until `retire`; else each pull leaves the one that it has
    loaded."""

    def __init__(
        self,
        reader: SlotReader,
        probe: list[list[int]],
        trace: Trace,
        engines: EngineLives,
        config: RunConfig,
    ) -> None:
        super().__init__(reader, probe, trace, engines)
        model, lora = model_config(config.model.path), config.model.lora
        tensors = adapter_tensors(widths_of(model), model["num_hidden_layers"], lora)
        self._expected = [TensorLayout(name, list(shape), config.model.dtype) for name, shape in tensors]
        self._model = Path(config.model.path)
        self._several = config.pipeline.refresh == "versions"
        self.loaded: set[int] = set()  # in the engine, and verified

    async def retire(self, keep: Collection[int]) -> None:
        """Unloads all adapters but these. Raises LaminarError while requests of one run."""
        for weight_id in sorted(self.loaded.difference(keep)):
            await self.engines.current.unload_adapter(weight_id)
            self.loaded.discard(weight_id)

    async def replace(self) -> None:
        await super().replace()
        self.loaded.clear()
        self.model_logprobs = []

    async def _verified(
        self, handle: SlotHandle, clock: PullClock, restart: bool, paused: bool
    ) -> list[float]:
        logprobs = await super()._verified(handle, clock, restart, paused)
        engine = self.engines.current
        if not self.model_logprobs:  # once for each engine
            scores = await engine.score(self.probe, BASE)
            self.model_logprobs = [value for sequence in scores for value in sequence]
        check_acts(engine.name, logprobs, self.model_logprobs, handle.manifest)
        clock.lap("acts")
        self.loaded.add(handle.weight_id)
        if not self._several:
            await self.retire({handle.weight_id})
            clock.lap("unload")
        return logprobs

    async def _give(self, handle: SlotHandle, clock: PullClock, restart: bool, paused: bool) -> Sums:
        """The slot's adapter in the engine, which a restart gives the model first."""
        check_file(handle)
        check_layout(self._expected, handle.manifest)
        clock.lap("check")
        if restart:
            await self.engines.start(self._model, None)
            self._unstarted = False
            clock.lap("start")
        with self.trace.span("load", weight_id=handle.weight_id, step=handle.step):
            sums = await self.engines.current.load_adapter(handle.directory, handle.weight_id)
        clock.lap("load")
        return sums


def new_loader(
    reader: SlotReader, probe: list[list[int]], trace: Trace, engines: EngineLives, config: RunConfig
) -> WeightLoader:
    """The loader for what this run publishes."""
    if config.model.lora.rank:
        return AdapterLoader(reader, probe, trace, engines, config)
    return WeightLoader(reader, probe, trace, engines)
