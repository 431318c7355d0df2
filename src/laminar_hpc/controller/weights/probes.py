"""The log-prob mismatch: engine and trainer score a fixed probe at each weight id; |engine - trainer| is
reported, and warned of."""

import math
import statistics
from collections.abc import Callable

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.observability import console
from laminar_hpc.machine.observability.metrics import MetricsWriter

# The mean |engine - trainer| log-prob on the probe that rounding explains. That of bfloat16 (8 bits) grows
# with how far logits are apart, and with depth: two sides that round at other places differ by 1 to 2 units
# of spread / 256 at 3 layers, by 6 at 48.
_FLOAT32_LIMIT = 1e-3
_BFLOAT16_UNITS = 1.15  # times the root of the layers: 2 at 3 layers, 8 at 48
# An adapter is judged by what it does to the log-probs once that is so many times what rounding explains, and
# is wrong where the engine misses more than this part of it.
_TOLD_APART, _MISSED = 4.0, 0.5


def mismatch_limit(dtype: str, layers: int, trainer: list[float]) -> float:
    """In nats. `trainer`: its log-probs of the probe; their standard deviation is the spread."""
    rounding = _BFLOAT16_UNITS * math.sqrt(layers) * statistics.pstdev(trainer) / 256
    return _FLOAT32_LIMIT if dtype == "float32" else max(_FLOAT32_LIMIT, rounding)


def check_adapter(who: str, weight_id: int, mean: float, moved: float, limit: float) -> None:
    """Raises LaminarError where an engine's log-probs differ from the trainer's by `mean` nats and the
    adapter has `moved` the trainer's by so many from those of the model alone: it acts on one side only, or
    otherwise."""
    if moved > _TOLD_APART * limit and mean > _MISSED * moved:
        raise LaminarError(
            f"the adapter of weight id {weight_id} does not act in {who} as in the trainer, where it moves "
            f"the fixed probe's log-probs by {moved:.1e} on average: {who} misses {mean:.1e} of that; look "
            "at rollout.engine_arguments, and whether both have the same model.path"
        )


class Probes:
    """`dtype`: of the served weights; `layers`: of the model; `say` prints a line for the user."""

    def __init__(self, dtype: str, layers: int, metrics: MetricsWriter, say: Callable[[str], None]) -> None:
        self._dtype = dtype
        self._layers = layers
        self._metrics = metrics
        self._say = say
        self._known: dict[int, dict[str, list[float]]] = {}
        self._without: dict[str, list[float]] = {}

    def without(self, who: str, logprobs: list[float]) -> None:
        """An engine's log-probs of the probe by the model alone, beside its adapters; empty without any."""
        self._without[who] = logprobs

    def scored(self, weight_id: int, step: int, who: str, logprobs: list[float]) -> None:
        """|engine - trainer| over the fixed probe, once both sides have scored it with the same weights.
        Raises LaminarError for an adapter that the engine does not compute with."""
        known = self._known.setdefault(weight_id, {})
        known[who] = logprobs
        trainer = known.get("trainer")
        if not trainer or not logprobs:  # an emulated trainer or engine scores nothing
            return
        for rollout in [name for name in known if name != "trainer"]:
            mismatches = [abs(a - b) for a, b in zip(trainer, known.pop(rollout), strict=True)]
            mean, largest = sum(mismatches) / len(mismatches), max(mismatches)
            limit = mismatch_limit(self._dtype, self._layers, trainer)
            fields = {"weight_id": weight_id, "step": step, "replica": rollout}
            self._metrics.write("logprob_mismatch", **fields, mean=mean, max=largest, limit=limit)
            if without := self._without.get(rollout):
                moved = statistics.fmean(abs(a - b) for a, b in zip(trainer, without, strict=True))
                check_adapter(rollout, weight_id, mean, moved, limit)
            if mean > limit:
                text = (
                    f"log-prob mismatch of {rollout} at weight id {weight_id} is {mean:.1e}, "
                    f"above the {limit:.1e} that rounding to {self._dtype} explains: engine and "
                    "trainer do not compute the same model; look at rollout.engine_arguments "
                    "(quantization, KV cache dtype), model.dtype and model.float32_head"
                )
                self._say(console.line("warning", text))
        for old in [i for i in self._known if i < weight_id - 100]:
            del self._known[old]
