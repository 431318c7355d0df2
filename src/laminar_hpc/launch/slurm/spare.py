"""Leaving the run to the spare (store/turn.py) when only the job of its controller is to end."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from laminar_hpc.config.errors import LaminarError, said
from laminar_hpc.line.waiting import shown_in
from laminar_hpc.machine.locks.run_lock import RunLock, refuse_if_held

_LOOK_SECONDS = 0.25
_TOLD_AS_WELL_SECONDS = 4.0  # within which a job that is told of its end has taken its sign away
_DEATH_SECONDS = 5.0  # of a process whose parent was killed
_SIGNS = "spare.*"


def spare_of(run_dir: Path, sleep: Callable[[float], None] = time.sleep) -> str:
    """Who waits to take over, as "spare 7 (pid 4711 of ...)"; "" if nobody does. Takes some seconds: one that
    is told to end in the same moment is none."""
    if not (first := shown_in(run_dir / "jobs", _SIGNS)):
        return ""
    sleep(_TOLD_AS_WELL_SECONDS)
    return next((who for who in shown_in(run_dir / "jobs", _SIGNS) if who in first), "")


def hand_over(run_dir: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Frees the lock of the run, whose holder was killed on this machine: the spare need not watch it."""
    waited = 0.0
    while said(refuse_if_held, run_dir) and waited < _DEATH_SECONDS:
        sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS
    with suppress(LaminarError, OSError):  # the spare was faster
        RunLock([run_dir], lambda _: None).release()
