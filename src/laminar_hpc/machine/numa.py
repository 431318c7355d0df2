"""Keeps a process on the CPUs that lie next to its GPU, and with them the memory that it takes: across the
socket a copy to the host, or from it, reaches about half the rate.

SGLang does the same for engines by itself (SGLANG_AUTO_NUMA_BIND). Linux only; imports no torch.
"""

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)
GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each, named as on the PCI bus
PCI = Path("/sys/bus/pci/devices")


def cpus_near(uuid: str) -> set[int]:
    """The CPUs of the memory node of the GPU with this UUID, with or without "GPU-"; empty where they are
    unknown, as in a container that hides them, or for a slice of a GPU."""
    wanted = "GPU-" + uuid.removeprefix("GPU-")
    try:
        for folder in GPUS.iterdir():
            if wanted in (folder / "information").read_text().split():
                return _listed((PCI / folder.name.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        pass
    return set()


def _listed(text: str) -> set[int]:
    """Of the kernel's form of a list: 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def stay_near(uuid: str) -> None:
    """From here on this thread, and those that it starts, run on the CPUs next to the GPU, as far as they are
    among those that it was given."""
    given = os.sched_getaffinity(0)
    near = cpus_near(uuid) & given
    if near and near != given:
        os.sched_setaffinity(0, near)
        log.info("runs on the %d of %d CPUs that lie next to GPU %s", len(near), len(given), uuid)
