"""Which machine of a run this is: the lowest number that no live process holds, by a lock in
RUN_DIR/machines/NUMBER (machine/locks/run_lock.py), so that machines come and go and no two have the same.
The relays of a machine have theirs by it."""

from itertools import count
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.system_schema import RANKS_MAX
from laminar_hpc.machine.locks.run_lock import RunLock

_FOLDER = "machines"
_STALE_SECONDS = 16.0  # without a sign of life another machine may have the number


class MachineNumber:
    """Held by this process until `release`, or its end."""

    def __init__(self, run_dir: Path, lanes: int) -> None:
        """`lanes`: relays of each machine. Raises LaminarError if no number is left or can be written."""
        for number in count():
            if (number + 1) * lanes > RANKS_MAX:
                raise LaminarError(f"{run_dir / _FOLDER}: all {number} numbers of machines are taken")
            folder = run_dir / _FOLDER / str(number)
            try:
                self._lock = RunLock([folder], lambda _: None, _STALE_SECONDS)
            except Refused:  # another machine's
                continue
            except OSError as error:
                raise LaminarError(
                    f"{folder} cannot be written ({error.strerror}): run_dir must be on a file system that "
                    "all machines share"
                ) from None
            self.number = number
            return

    def release(self) -> None:
        self._lock.release()
