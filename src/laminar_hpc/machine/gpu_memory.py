"""Whether a run fits the memory of this machine: of its GPUs by nvidia-smi, or of its host where it has none.
Imports no torch."""

import subprocess
from collections import Counter
from collections.abc import Sequence

import psutil

from laminar_hpc.config.check import Derived, memory_need
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.memory import USABLE, Need, check_memory, shared_bytes, shared_misfit
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.devices import SMI_SECONDS, devices_of, present
from laminar_hpc.machine.roles import RoleOfRank

_MIB = 1 << 20


def gigabytes_of_gpus() -> list[float]:
    """Memory of each GPU here in 10^9 bytes, in the order of `present`; [] without GPUs or if unknown."""
    names = present()
    if not names:
        return []
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # a container may hide the tool; nothing is refused then
    return parse_smi(done.stdout, names)


def parse_smi(printed: str, names: Sequence[str]) -> list[float]:
    """Sizes by nvidia-smi's lines `index, uuid, MiB`, for GPUs named by index or by the beginning of their
    UUID; a name that is neither (a MIG slice) makes all unknown: []."""
    rows = [
        [word.strip() for word in line.split(",")] for line in printed.splitlines() if line.count(",") == 2
    ]

    def size(name: str) -> str:
        begins = name if name.startswith("GPU-") else "?"
        return next((mib for index, uuid, mib in rows if name == index or uuid.startswith(begins)), "")

    sizes = [size(name) for name in names]
    return [int(mib) * _MIB / 1e9 for mib in sizes] if all(map(str.isdigit, sizes)) else []


def check_dry_run(config: RunConfig, derived: Derived) -> None:
    """Holds each role against the smallest GPU here, unless a size is configured. Raises LaminarError."""
    if config.trainer.gpu_memory_gigabytes and config.rollout.gpu_memory_gigabytes:
        return
    check_memory(config, memory_need(config, derived), min(gigabytes_of_gpus(), default=None))


def check_gpus(
    config: RunConfig, derived: Derived, here: Sequence[RoleOfRank], sizes: Sequence[float]
) -> None:
    """Adds up what the ranks of this machine put on each of its GPUs, of `sizes` in gigabytes. Raises
    LaminarError for the first one that is too small."""
    need = memory_need(config, derived)
    trainers: Counter[int] = Counter()
    engines: Counter[int] = Counter()
    for mine in here:
        if mine.role in ("trainer", "rollout"):
            on = trainers if mine.role == "trainer" else engines
            on.update(devices_of(config, here, mine, len(sizes)))
    for device, size in enumerate(sizes):
        on_it = Need(need.trainer * trainers[device], need.rollout)
        if (trainers[device] and engines[device]) or engines[device] > 1:
            if shared_bytes(on_it, engines[device]) <= USABLE * size * 1e9:
                continue
            raise LaminarError(f"GPU {device}: {shared_misfit(config, on_it, engines[device], size)}")
        check_memory(config, Need(on_it.trainer, engines[device] * on_it.rollout), size, found_counts=True)


def host_memory_warning(config: RunConfig, derived: Derived) -> str:
    """One line when a run without GPUs needs more than the host has left (weight slots too); else empty."""
    need = memory_need(config, derived)
    engines = derived.rollout_ranks * config.rollout.tensor_parallel * need.rollout
    total = derived.trainer_ranks * need.trainer + engines + derived.slot_bytes
    free = psutil.virtual_memory().available
    if total <= free:
        return ""
    cure = "lower rollout.kv_cache_tokens or trainer.tokens_per_microbatch, or take a smaller model"
    has = f"this machine has no GPU and {free / 1e9:.1f} GB of memory left"
    return f"{has}, the run needs about {total / 1e9:.1f} GB: {cure}"
