"""Pipelines as policy values; nothing in the simulator branches on a pipeline's name. What a run has too is
read from conf/pipeline."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.system_schema import PipelineConfig
from laminar_hpc.config.yaml_text import load_yaml


@dataclass(frozen=True)
class Rules:
    """The first five and `dispatch` are PipelineConfig's. `placement`: split GPUs, or colocated (all do both
    in turns)."""

    refresh: str
    max_staleness: float | None
    consumption: str = "batch"
    keep_kv: bool = False
    repack: str = "off"
    placement: str = "split"
    relays: bool = False  # weights through the relay tier; else a global synchronisation
    isolated: bool = False  # a failure stops one role; else it restarts the job
    adaptive: bool = False  # the bound follows who waits, and max_staleness is its maximum
    dispatch: str = "in_order"
    overlapped: bool = False  # a batch is collected and padded while the one before is trained

    @property
    def empties(self) -> bool:
        """As PipelineConfig.empties."""
        return self.repack != "off" and self.refresh == "drained"

    @property
    def whole_staleness(self) -> int | None:
        """Steps that a trajectory may be late at most: with a bound of 0.5 (verl's staleness_threshold) half
        a batch may be one step late."""
        return None if self.max_staleness is None else math.ceil(self.max_staleness)


def preset(name: str, **changes: Any) -> Rules:
    """The pipeline of conf/pipeline/NAME.yaml, with changes and what only the simulator knows."""
    live = PipelineConfig(**load_yaml((conf_directory() / "pipeline" / f"{name}.yaml").read_text()))
    shared = {field.name for field in dataclasses.fields(Rules)} & dataclasses.asdict(live).keys()
    return Rules(**{**{key: getattr(live, key) for key in shared}, **changes})


def laminar(**changes: Any) -> Rules:
    """The preset `laminar` with its relays and its isolation of failures."""
    return preset("laminar", relays=True, isolated=True, overlapped=True, **changes)


PIPELINES = {
    "sync": preset("sync", placement="colocated"),
    "sync_split": preset("sync"),
    "one_step": preset("one_step"),
    "stream": preset("stream"),
    "partial": preset("partial", overlapped=True),  # AReaL: staleness 4, prefill again
    "partial_stale_kv": preset("partial", keep_kv=True, overlapped=True),
    # generation stops when a batch is full, the rest goes on later
    "partial_colocated": preset("partial", max_staleness=1, placement="colocated"),
    "laminar": laminar(),
    "laminar_reprefill": laminar(repack="reprefill"),
    "laminar_auto": laminar(max_staleness=8, adaptive=True),
    "laminar_no_repack": laminar(repack="off"),
    # As the paper: no bound on staleness, first finished first trained.
    "laminar_unbounded": laminar(max_staleness=None),
    "laminar_unbounded_no_repack": laminar(max_staleness=None, repack="off"),
    # several adapters in one engine: as laminar, and a replica never drains
    "versions": preset("versions", relays=True, isolated=True, overlapped=True),
    # DORA (arXiv 2604.26256), K = 3. Section 4.2: at most K versions generate, and the next enters when all
    # of the oldest have been forwarded to training, so staleness is two steps at most; training begins as
    # soon as a batch is complete; KV moves between replicas of one version.
    "dora": laminar(max_staleness=2),
}
