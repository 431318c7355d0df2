"""How far a prediction may be off because its constants may be: they are drawn again and again from what is
known of each, and the spread of the simulated rates is the range that `laminar sim` prints.

A draw depends on its number alone, so all pipelines and scales of a sweep meet the same constants and their
ratios are as certain as their common assumptions cancel. Rates are kept in a file by what they follow from.
"""

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.store.run_files import write_whole

# Standard deviation of the log of each constant. Those without an entry are exact enough, or a setting: rules
# of engines and policies, times of failures.
SPREAD = {
    "decode_hbm_efficiency": 0.06,  # seven models of one table: residuals of 3% to 7%
    "decode_layer_seconds": 0.4,  # 0.055 ms on H100, 0.13 ms on A100
    "eager_layer_seconds": 0.25,  # 0.26 to 0.8 ms with one request in published runs without CUDA graphs
    "decode_allreduce_seconds": 0.4,  # assumed
    "nvlink_efficiency": 0.1,
    "decode_kv_efficiency": 0.2,  # 0.28 to 0.56 with one request, assumed 0.65 with many
    "replica_speed_spread": 0.7,  # 8% between the extremes in one study, 22% in its worst case
    "decode_flops_efficiency": 0.1,
    "kv_memory_share": 0.05,  # 0.80 to 0.92 in published recipes
    "kv_memory_share_colocated": 0.15,  # 0.60 and 0.80 in published recipes
    "prefill_mfu": 0.2,
    "train_kernel_efficiency": 0.15,  # 0.41 to 0.48 with exchanges, 0.65 for single products
    "update_overhead": 0.7,  # assumed
    "batch_handling": 0.3,  # one system's
    "overlapped_handling": 0.5,
    "colocated_switch": 0.4,  # 11 to 55 s
    "publish_bytes_per_second": 0.1,
    "global_sync_bytes_per_second": 0.5,  # 4 to 20 GB/s
    "pull_overhead": 0.5,  # assumed
    "wan_streams": 0.5,  # assumed
    "changed_bytes_share": 0.5,  # 1.6% at a learning rate of 1e-6, 33% at 5e-5
    "group_exchange_bytes_per_second": 0.5,  # assumed
    "kv_move_bytes_per_second": 0.1,
    "kv_move_latency": 0.7,  # assumed
    "repack_kv_share": 0.05,  # assumed
    "expert_launch_seconds": 0.75,  # 0.15, 0.37 and 0.65 ms in three publications
    "expert_load_spread": 0.2,  # Gini coefficients of 0.15 to 0.24
}
_SHARES = ("efficiency", "share", "mfu")  # endings of what is at most 1
_QUANTILE = 0.1  # the range leaves out a tenth of the draws on either side


def draw(number: int, seed: int) -> dict[str, float]:
    """Values of all uncertain constants, the same for the same number and seed."""
    chance = random.Random(f"constants:{seed}:{number}")
    return {name: deviated(name, chance.gauss(0.0, 1.0)) for name in SPREAD}


def deviated(name: str, deviations: float) -> float:
    """An uncertain constant so many standard deviations above what is taken."""
    value: float = getattr(DEFAULT, name) * math.exp(SPREAD[name] * deviations)
    return min(value, 0.97) if name.removesuffix("_colocated").endswith(_SHARES) else value


def quantiles(values: list[float], middle: float) -> tuple[float, float]:
    """The range of the draws around the prediction: it holds eight in ten of them, and the prediction."""
    ordered = sorted(values)
    cut = round(_QUANTILE * (len(ordered) - 1))
    return min(middle, ordered[cut]), max(middle, ordered[len(ordered) - 1 - cut])


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
