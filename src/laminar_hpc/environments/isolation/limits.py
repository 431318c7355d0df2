"""Limits of processes that run what others have written. Imports nothing heavy."""

import contextlib
import math
import os
import resource
from pathlib import Path

OPEN_FILES = 256


def set_limits(memory_bytes: int, file_bytes: int, tasks: int | None) -> None:
    """For this process and each one that it starts: address space, size of a file, and `tasks`, the processes
    and threads of this user (in this user namespace) above which none starts; None = as before."""
    lower(resource.RLIMIT_AS, memory_bytes)
    lower(resource.RLIMIT_FSIZE, file_bytes)
    lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_MSGQUEUE, 0)
    if tasks is not None:
        lower(resource.RLIMIT_NPROC, tasks)


def set_cpu_limit(seconds: float) -> None:
    """CPU time of this process, and of each one that it starts; a second more than that, rounded up."""
    lower(resource.RLIMIT_CPU, math.ceil(seconds) + 1)


def lower(which: int, value: int) -> None:
    """A limit of the resource module, soft and hard; never above the hard one that there is."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def tasks_of_user() -> int:
    """Processes and threads of this user on this machine, as RLIMIT_NPROC counts them."""
    count, user = 0, os.getuid()
    with os.scandir("/proc") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == user:
                    count += os.stat(f"{entry.path}/task").st_nlink - 2
    return count


def prefer_for_killing() -> None:
    """When memory runs out, the kernel ends this process and what it starts before engines and trainers."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
