"""How far a prediction may be off because its constants may be: they are drawn again and again from what is
known of each, and the spread of the simulated rates is the range that `laminar sim` prints.

A draw depends on its number alone, so all pipelines and scales of a sweep meet the same constants and their
ratios are as certain as their common assumptions cancel. What the model leaves out is drawn too, as a factor
on all that tokens take, as large as published rows of the same kind are off. Rates are kept in a file by what
they follow from.
"""

import dataclasses
import hashlib
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from laminar_hpc.machine.files.whole import write_whole
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.tables import GPUS, Gpu, Model

# Standard deviation of the log of each constant. Those without an entry are exact enough, or a setting: rules
# of engines and policies, times of failures.
SPREAD = {
    "decode_hbm_efficiency": 0.06,  # seven models of one table: residuals of 3% to 7%
    "decode_layer_seconds": 0.4,  # 0.055 ms on H100, 0.13 ms on A100
    "decode_latent_layer_seconds": 0.45,  # 0.11 and 0.27 ms in two publications
    "eager_layer_seconds": 0.25,  # 0.26 to 0.8 ms with one request in published runs without CUDA graphs
    "eager_expert_layer_seconds": 0.3,  # one run
    "decode_allreduce_seconds": 0.4,  # assumed
    "network_allreduce_seconds": 0.4,  # 46 us with InfiniBand, 123 us with a cloud's own network
    "network_hop_seconds": 0.4,
    "network_allreduce_bytes_per_second": 0.4,  # one network
    "decode_attention_efficiency": 0.2,  # 0.39 to 0.82 of kernels alone
    "decode_state_efficiency": 0.2,  # one kernel
    "nvlink_efficiency": 0.1,
    "decode_kv_efficiency": 0.2,  # 0.28 to 0.56 with one request, assumed 0.65 with many
    "replica_speed_spread": 0.7,  # 8% between the extremes in one study, 22% in its worst case
    "decode_flops_efficiency": 0.1,
    "kv_memory_share": 0.05,  # 0.80 to 0.92 in published recipes
    "kv_memory_share_colocated": 0.15,  # 0.60 and 0.80 in published recipes
    "prefill_mfu": 0.2,
    "train_kernel_efficiency": 0.15,  # 0.41 to 0.48 with exchanges, 0.65 for single products
    "train_narrow_hidden": 0.4,  # from two sizes of one system
    "logit_bytes": 0.4,  # arithmetic; a fused kernel needs a third
    "update_overhead": 0.7,  # assumed
    "batch_handling": 0.3,  # one system's
    "overlapped_handling": 0.5,
    "colocated_switch": 0.4,  # 5 to 13 s in five runs, 55 s in a sixth
    "colocated_gather_share": 0.3,  # 13.9 to 23.6 GB/s
    "colocated_train_rate": 0.15,  # 0.78, 0.92 and 1.12 in three systems
    "publish_bytes_per_second": 0.1,
    "global_sync_share": 0.5,  # 0.18 to 0.28; verl, and NeMo RL before it was tuned, 0.02 to 0.1
    "pull_overhead": 0.5,  # assumed
    "wan_streams": 0.5,  # assumed
    "changed_bytes_share": 0.5,  # 1.6% at a learning rate of 1e-6, 33% at 5e-5
    "group_exchange_bytes_per_second": 0.5,  # assumed
    "kv_move_bytes_per_second": 0.1,
    "kv_move_latency": 0.7,  # assumed
    "repack_kv_share": 0.05,  # assumed
    "expert_launch_seconds": 0.85,  # 0.09, 0.32 and 0.64 ms in three publications
    "expert_load_spread": 0.2,  # Gini coefficients of 0.15 to 0.24
    "decode_adapter_share": 0.5,  # one system's
    "decode_request_seconds": 0.6,  # 29 us in one publication, 100 us in one of an older version
    # root mean squares of the logs of the validation page's rows of dense models on H100 and H800
    "generation_error": 0.06,
    "training_error": 0.06,
}
# The same of its rows of models with experts, and of GPUs that are neither; both add up.
EXPERTS_ERROR, OTHER_GPU_ERROR = 0.15, 0.35
_ERRORS = ("generation_error", "training_error")
_SHARES = ("efficiency", "share", "mfu")  # endings of what is at most 1
_NORMAL = statistics.NormalDist()
_COVERED = 0.8  # of new draws, by the range


def spreads(model: Model, gpus: Iterable[Gpu]) -> dict[str, float]:
    """Of each constant for a model on GPUs: those whose kind has been tried less are less certain."""
    other = any(gpu not in (GPUS["H100"], GPUS["H800"]) for gpu in gpus)
    parts = (EXPERTS_ERROR if model.experts else 0.0, OTHER_GPU_ERROR if other else 0.0)
    return SPREAD | {name: math.hypot(SPREAD[name], *parts) for name in _ERRORS}


def draw(number: int, seed: int, spread: dict[str, float] = SPREAD) -> dict[str, float]:
    """Values of all uncertain constants, the same for the same number and seed."""
    chance = random.Random(f"constants:{seed}:{number}")
    return {name: deviated(name, chance.gauss(0.0, 1.0), spread) for name in spread}


def deviated(name: str, deviations: float, spread: dict[str, float] = SPREAD) -> float:
    """An uncertain constant so many standard deviations above what is taken."""
    value: float = getattr(DEFAULT, name) * math.exp(spread[name] * deviations)
    return min(value, 0.97) if name.removesuffix("_colocated").endswith(_SHARES) else value


def interval(values: list[float], middle: float) -> tuple[float, float]:
    """The range in which a further draw lies with a probability of 0.8, and the prediction `middle`. Logs of
    rates are taken as normal, with mean and deviation known from the draws alone: m +- t s (1 + 1/n)^(1/2),
    t Student's for n - 1 degrees of freedom. One draw, which has no deviation, is one end."""
    logs = [math.log(value) for value in values]
    half = 0.0
    if len(logs) > 1:
        half = student(len(logs) - 1) * statistics.stdev(logs) * math.sqrt(1.0 + 1.0 / len(logs))
    mean = statistics.fmean(logs)
    return min(middle, math.exp(mean - half)), max(middle, math.exp(mean + half))


def student(freedom: int, covered: float = _COVERED) -> float:
    """The half-width of Student's t that covers so much, in deviations, from the normal one (Abramowitz and
    Stegun, 26.7.5); exact for one degree of freedom, where the series is not."""
    if freedom == 1:
        return math.tan(math.pi * covered / 2.0)
    z = _NORMAL.inv_cdf((1.0 + covered) / 2.0)
    terms = (
        z,
        (z**3 + z) / 4.0,
        (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0,
        (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


class Rates:
    """Remembers simulated rates by what they follow from, in `file`, or in memory alone."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.known: dict[str, float] = {}
        if file is not None and file.exists():
            try:
                found = json.loads(file.read_text())
                self.known = {str(key): float(rate) for key, rate in found.items()}
            except (OSError, ValueError, TypeError, AttributeError):
                self.known = {}  # a cache: it is written anew

    def of(self, settings: object, simulate: Callable[[], float]) -> float:
        """The rate for these settings, simulated where it is not known. The simulator's constants and source
        are part of the settings."""
        text = json.dumps([settings, dataclasses.asdict(DEFAULT), _sources()], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        if key not in self.known:
            self.known[key] = simulate()
        return self.known[key]

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(self.known))


def _sources() -> list[tuple[str, int]]:
    """Name and time of the simulator's files: another version knows nothing of its rates."""
    folder = Path(__file__).parent
    return [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*.py"))]
