"""Pipelines as policy values; nothing in the simulator branches on a pipeline's name. `laminar` and `sync`
are those of conf/pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """`refresh`: drained (a replica pulls when its local batch is done), barrier (all wait for each other),
    interrupt (new weights come into running trajectories). `consumption`: batch or stream (mini-batches).
    `placement`: split GPUs, or colocated (all do both in turns)."""

    refresh: str
    max_staleness: int | None
    consumption: str = "batch"
    placement: str = "split"
    repack: str = "off"  # off | reprefill | kv
    interrupted_kv: str = "reprefill"  # reprefill | stale
    relays: bool = False  # weights through the relay tier; else a global synchronisation
    isolated: bool = False  # a failure stops one role; else it restarts the job


PIPELINES = {
    "sync": Rules("barrier", 0, placement="colocated"),
    "sync_split": Rules("barrier", 0),
    "one_step": Rules("barrier", 1),
    "stream": Rules("barrier", 1, consumption="stream"),
    "partial": Rules("interrupt", 4),  # AReaL: staleness 4, prefill again
    "partial_stale_kv": Rules("interrupt", 4, interrupted_kv="stale"),
    # generation stops when a batch is full, the rest goes on later
    "partial_colocated": Rules("interrupt", 1, placement="colocated"),
    "laminar": Rules("drained", 2, repack="kv", relays=True, isolated=True),
    "laminar_reprefill": Rules("drained", 2, repack="reprefill", relays=True, isolated=True),
    "laminar_no_repack": Rules("drained", 2, relays=True, isolated=True),
    # As the paper: no bound on staleness, first finished first trained.
    "laminar_unbounded": Rules("drained", None, repack="kv", relays=True, isolated=True),
    "laminar_unbounded_no_repack": Rules("drained", None, relays=True, isolated=True),
    # DORA (arXiv 2604.26256), K = 3. Section 4.2: at most K versions generate, and the next enters when all
    # of the oldest have been forwarded to training, so staleness is two steps at most; training begins as
    # soon as a batch is complete; KV moves between replicas of one version.
    "dora": Rules("drained", 2, repack="kv", relays=True, isolated=True),
}
