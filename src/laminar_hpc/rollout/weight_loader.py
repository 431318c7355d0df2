"""How a drained replica gets newer weights: check the slot, copy it into the engine, compare sums of the live
parameters, score the probe.

Used by worker.py. A slot that does not fit the engine is refused before anything is copied. Whatever goes
wrong from the copy on, the engine is replaced by one that starts from the slot, and is verified again;
weights are announced only when the live parameters have the manifest's sums
(docs/promises.md#verified-weights).
"""

import asyncio
import contextlib
import logging
import math
import os
import struct
import time
from dataclasses import dataclass, field

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.interface import EngineHangs, Sums, TensorLayout
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.weights.manifest import Manifest, safetensors_header
from laminar_hpc.weights.slots import SlotGone, SlotHandle, SlotReader

logger = logging.getLogger(__name__)
TRIES = 2  # fresh engines in a row before the weights themselves are held to be wrong
LEASE_SECONDS = 30.0  # maximum time in which every slot looked at is being rewritten


OVERFLOW_CURE = (
    "it overflows: set model.dtype=bfloat16 or float32, or another rollout.engine_arguments.attention_backend"
)


class SlotRefused(LaminarError):
    """The slot is not what its manifest says, or does not fit; a fresh engine would not mend that."""


class EngineOverflows(SlotRefused):
    """The live weights are the trainer's, which are finite, but what the engine computes with them is not."""


class EngineSumsDiffer(LaminarError):
    """What the engine holds is not what the manifest says."""


@dataclass
class Pulled:
    """Weights that are in the engine and verified. `phases`: seconds by name (lock, check, load, ...)."""

    weight_id: int
    weight_step: int
    seconds: float
    phases: dict[str, float]
    probe_logprobs: list[float]
    model_logprobs: list[float] = field(default_factory=list)  # of the model alone, beside an adapter


@dataclass
class PullClock:
    """Seconds of a pull by phase."""

    phases: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.last
        self.last = now


def check_layout(layout: list[TensorLayout], manifest: Manifest) -> None:
    """Raises SlotRefused unless manifest and engine's `layout` agree on names, shapes and dtypes."""
    have = {tensor.name: (tensor.shape, tensor.dtype) for tensor in layout}
    want = {tensor.name: (tensor.shape, tensor.dtype) for tensor in manifest.tensors}
    for name in sorted(have.keys() | want.keys()) if have != want else ():
        if have.get(name) != want.get(name):
            in_slot, in_engine = want.get(name, "missing"), have.get(name, "missing")
            raise SlotRefused(
                f"weight id {manifest.weight_id}: tensor {name} is "
                f"{in_slot} in the slot and {in_engine} in the engine"
            )


def check_file(handle: SlotHandle) -> None:
    """Raises SlotRefused unless the file is laid out as its manifest says, on which a fresh start relies.
    Raises SlotGone when it has left with its relay."""
    path, expected = handle.directory / handle.manifest.file, safetensors_header(handle.manifest)
    try:
        with open(path, "rb") as file:
            header = file.read(8)
            header += (
                file.read(min(struct.unpack("<Q", header)[0], len(expected))) if len(header) == 8 else b""
            )
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise SlotGone(f"{path} is gone") from None
    if header != expected or size != len(expected) + handle.manifest.data_bytes:
        raise SlotRefused(f"weight id {handle.weight_id}: {path} is not laid out as its manifest says")


def check_sums(live: Sums, manifest: Manifest) -> None:
    """Raises SumsDiffer unless every live tensor has the manifest's sums."""
    wrong = [t.name for t in manifest.tensors if tuple(live.get(t.name, ())) != (t.sum_words, t.sum_indexed)]
    if wrong:
        count = f"{len(wrong)} of {len(manifest.tensors)} tensors"
        raise EngineSumsDiffer(
            f"weight id {manifest.weight_id}: {count} in the "
            f"engine differ from the manifest, first {wrong[0]}"
        )


class WeightLoader:
    """Gives the engine of `engines` other weights, and another engine if that is needed."""

    def __init__(
        self, reader: SlotReader, probe: list[list[int]], trace: Trace, engines: EngineLives
    ) -> None:
        self.reader = reader
        self.probe = probe
        self.trace = trace
        self.engines = engines
        self._layout: list[TensorLayout] | None = None  # of the running engine
        self.model_logprobs: list[float] = []  # of the probe, by the model alone, beside adapters
        self._held = contextlib.ExitStack()
        self._unstarted = False  # the engine was replaced, and starts with the next pull

    def hold(self, weight_id: int) -> None:
        """Keeps the slot of these weights, soon to be pulled, as it is until `let_go`. Raises SlotGone."""
        self.let_go()
        self._held.enter_context(self.reader.lease(self.reader.find(weight_id)))

    def let_go(self) -> None:
        """Ends `hold`, if there is one."""
        self._held.close()

    async def pull(self, paused: bool = False, weight_id: int | None = None, beside: bool = False) -> Pulled:
        """Gives the engine the newest slot, or that of `weight_id`, and verifies it. Raises SlotRefused, or
        LaminarError when TRIES fresh engines fail as well; SlotGone only with `weight_id`.

        `paused`: its requests stand still in it and go on as soon as the sums are equal; if it must be
        replaced they fail. `beside`: its requests go on meanwhile on other weights; EngineHangs where it must
        be replaced, which is the caller's to do.
        """
        t0, clock, restarts = time.time(), PullClock(), 0
        deadline = time.monotonic() + LEASE_SECONDS
        while True:
            handle = None
            try:
                handle = self._slot(weight_id)
                logprobs = await self._verified(handle, clock, restart=self._unstarted, paused=paused)
                break
            except SlotGone as gone:
                if weight_id is not None:
                    raise
                if time.monotonic() > deadline:
                    raise LaminarError(
                        f"no weight slot could be read for {LEASE_SECONDS:g} s, the last because {gone}"
                    ) from None
                await asyncio.sleep(0.01)
            except SlotRefused:
                raise
            except LaminarError as error:
                assert handle is not None
                if beside:
                    raise EngineHangs(f"{error}; it is started again") from None
                restarts += 1
                if restarts > TRIES:
                    raise LaminarError(
                        f"{error}; the same after {TRIES} fresh starts from {handle.directory}"
                    ) from None
                logger.warning(
                    "pull of weight id %d: %s; starting the engine from the slot", handle.weight_id, error
                )
                await self.replace()
                deadline = time.monotonic() + LEASE_SECONDS  # no slot was looked at meanwhile
        t1 = time.time()
        self.trace.record("pull", t0, t1, weight_id=handle.weight_id, step=handle.step, restarts=restarts)
        return Pulled(handle.weight_id, handle.step, t1 - t0, clock.phases, logprobs, self.model_logprobs)

    async def replace(self) -> None:
        """Ends the engine; the next pull starts another from its slot."""
        await self.engines.replace()
        self._layout = None
        self._unstarted = True

    def _slot(self, weight_id: int | None) -> SlotHandle:
        handle = self.reader.newest() if weight_id is None else self.reader.find(weight_id)
        if handle is None:  # a relay that has been started again writes its slots anew
            raise SlotGone(f"there is no complete one under {self.reader.root}")
        return handle

    async def _verified(
        self, handle: SlotHandle, clock: PullClock, restart: bool, paused: bool
    ) -> list[float]:
        """The slot's weights in the engine, verified; returns the log-probs of the probe."""
        paused = paused and not restart
        with self.reader.lease(handle):
            clock.lap("lock")
            sums = await self._give(handle, clock, restart, paused)
        check_sums(sums, handle.manifest)
        clock.lap("sums")
        engine = self.engines.current
        if paused:
            await engine.resume()
        scores = await engine.score(self.probe, str(handle.weight_id))
        clock.lap("probe")
        logprobs = [value for sequence in scores for value in sequence]
        if not all(math.isfinite(value) for value in logprobs):
            raise EngineOverflows(
                f"{engine.name} holds the trainer's weights of step {handle.step} bit for bit and they are "
                f"finite, but its log-probs of the fixed probe are not: {OVERFLOW_CURE}; see {engine.log}"
            )
        return logprobs

    async def _give(self, handle: SlotHandle, clock: PullClock, restart: bool, paused: bool) -> Sums:
        """The slot's weights into the engine, by a copy or a fresh start; the sums of its live parameters."""
        check_file(handle)
        engine = self.engines.current
        if restart:
            await self.engines.start(handle.directory, handle.weight_id)
            self._unstarted = False
            clock.lap("start")
        if self._layout is None:
            self._layout = await engine.layout()
        check_layout(self._layout, handle.manifest)
        clock.lap("check")
        if restart:
            return await engine.sums()
        with self.trace.span("load", weight_id=handle.weight_id, step=handle.step):
            sums = await engine.load_weights(handle.directory, handle.weight_id, paused)
        clock.lap("load")
        return sums
