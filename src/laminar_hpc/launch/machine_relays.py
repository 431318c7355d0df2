"""The relays of a machine that several jobs of a run, or joins, share: those of one serve all rollouts."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.launch.launch import WorkerGroup
from laminar_hpc.machine.locks.holder import HeldByAnother, hold, is_held


class MachineRelays:
    """This job's, which are started once no other job of the run has any here."""

    def __init__(self, run: str, shm_dir: str, start: Callable[[], list[WorkerGroup]]) -> None:
        """`run`: the same for all of its jobs; `shm_dir`: for all who would find these relays' slots."""
        name = hashlib.sha256(run.encode()).hexdigest()[:12]
        self._file = Path(shm_dir) / f"laminar-relays-{name}"
        self._start = start
        self._lock: int | None = None

    def are_another_jobs(self) -> bool:
        """Another job has them."""
        return is_held(self._file)

    def look(self) -> list[WorkerGroup]:
        """Returns those that it has started now, once."""
        if self._lock is not None:
            return []
        try:
            self._lock = hold(self._file, 0.0)
        except HeldByAnother:
            return []
        return self._start()

    def close(self) -> None:
        """Those of the next job are started."""
        if self._lock is not None:
            self._file.unlink(missing_ok=True)  # first: whoever has opened it by now opens another one
            os.close(self._lock)
