"""When a job that is told of its end stops, and whether it is requeued afterwards.

A job is told by USR1 some minutes before its time limit, or by TERM when it is preempted. It trains on as
long as the stop leaves time for, by the steps and checkpoints before (policies/stopping.py). Afterwards the
run's last record says whether there is more to do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.line.address import ADDRESS_FILE
from laminar_hpc.machine.observability.durations import read_durations
from laminar_hpc.policies.stopping import stop_seconds
from laminar_hpc.store.run_end import last_end, last_word

BY_THE_USER = "laminar stop"  # the reason that it gives
ROLLOUTS_SECONDS = 45.0  # before the limit they leave, which takes 20
LEAD_SECONDS = 600.0  # before the limit USR1 comes, or twice what a stop needs where that is longer
_EARLY_SECONDS = 120.0  # Slurm sends it up to a minute before
CLOSE_SECONDS = 60.0  # for the controller to write its last record and take its address away


def lead_seconds(run_dir: Path) -> float:
    """How long before its limit a job of this run is to be told."""
    return max(LEAD_SECONDS, 2 * stop_seconds(*read_durations(run_dir)))


def is_near(run_dir: Path, left: float | None) -> bool:
    """Whether a job that has `left` seconds was told of its limit and nothing else. None: no limit."""
    return left is not None and left <= lead_seconds(run_dir) + _EARLY_SECONDS


def seconds_to_go_on(role: str, run_dir: Path, left: float | None) -> float:
    """How long a job of `role` that has `left` seconds may go on before it is to stop; 0 = stop now. None: it
    has no limit. With much time left USR1 was not for the limit."""
    if left is None or not is_near(run_dir, left):
        return 0.0
    needed = ROLLOUTS_SECONDS if role == "rollouts" else stop_seconds(*read_durations(run_dir))
    return max(0.0, left - needed)


@dataclass(frozen=True)
class JobEnding:
    """How a job's processes have ended: in order, told of the job's end, which controller was there when the
    first of them did (`served_by`), and whether a job that is told leaves a run that goes on (`alone`)."""

    in_order: bool
    told: bool
    served_by: float | None = None
    alone: bool = False

    def has_begun_again(self, run_dir: Path) -> bool:
        """Whether the run stopped, ended them, and goes on already with another controller."""
        now = controller_since(run_dir)
        return self.in_order and not self.told and now is not None and now != self.served_by


def controller_since(run_dir: Path) -> float | None:
    """When the run's controller wrote its address, by the file server's clock; None while there is none."""
    try:
        return (run_dir / ADDRESS_FILE).stat().st_mtime
    except FileNotFoundError:
        return None


def has_more_to_do(
    role: str, run_dir: Path, ended: JobEnding, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Whether a job of `role` whose processes have ended is to run again.

    Rollouts that were told leave a run that goes on, and so do trainers. For all others the run has ended: it
    is done, was stopped by the user, or has stopped because the time of one of its jobs was over. It may have
    begun again since, while some process of this job took its time."""
    if ended.alone and ended.told and (run_dir / ADDRESS_FILE).exists():
        return True
    waited = 0.0
    while (run_dir / ADDRESS_FILE).exists() and waited < CLOSE_SECONDS:
        if role != "controller" and ended.has_begun_again(run_dir):
            return not is_final(last_end(run_dir))
        sleep(0.5)
        waited += 0.5
    word = last_word(run_dir)
    return not is_final(word) and (ended.told or word.startswith("SIG"))


def is_final(word: str) -> bool:
    """Whether a run that ended with it is not to go on by itself."""
    return word == "done" or word.startswith((BY_THE_USER, "failed"))
