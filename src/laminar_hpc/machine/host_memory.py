"""How much host memory a process may still take. Imports no torch."""

from pathlib import Path

import psutil

_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def usable_memory() -> int:
    """Bytes of memory that are free for new processes, cut by the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_LIMIT), _read(_USED)
    return min(available, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else available


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
