"""The log-prob gap: engine and trainer score a fixed probe at each weight id; |engine - trainer| is reported, and warned of."""

from collections.abc import Callable

from laminar_hpc.observability import console
from laminar_hpc.observability.metrics import MetricsWriter

_GAP_LIMIT = {"float32": 1e-3, "bfloat16": 5e-2}  # mean |engine - trainer| log-prob on the probe that is still rounding


class Probes:
    """`dtype`: of the served weights; `say` prints a line for the user."""

    def __init__(self, dtype: str, metrics: MetricsWriter, say: Callable[[str], None]) -> None:
        self._dtype, self._metrics, self._say = dtype, metrics, say
        self._known: dict[int, dict[str, list[float]]] = {}

    def scored(self, weight_id: int, step: int, who: str, logprobs: list[float]) -> None:
        """|engine - trainer| over the fixed probe, as soon as both sides have scored it with the same weights."""
        known = self._known.setdefault(weight_id, {})
        known[who] = logprobs
        trainer = known.get("trainer")
        if not trainer or not logprobs:  # an emulated trainer or engine scores nothing
            return
        for rollout in [name for name in known if name != "trainer"]:
            gaps = [abs(a - b) for a, b in zip(trainer, known.pop(rollout), strict=True)]
            mean, worst = sum(gaps) / len(gaps), max(gaps)
            self._metrics.write("logprob_gap", weight_id=weight_id, step=step, replica=rollout, mean=mean, max=worst)
            if mean > _GAP_LIMIT[self._dtype]:
                self._say(
                    console.line(
                        "warning",
                        f"log-prob gap of {rollout} at weight id {weight_id} is {mean:.1e}: engine and trainer do not compute the "
                        "same model; look at rollout.engine_arguments (quantization, KV cache dtype) and model.dtype",
                    )
                )
        for old in [i for i in self._known if i < weight_id - 100]:
            del self._known[old]
