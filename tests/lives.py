"""Which of some processes live, looked at while they end."""

from collections.abc import Iterable
from contextlib import suppress

import psutil


def found(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that are there."""
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are there and have not ended: a zombie has."""
    alive = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
