"""A controller's job that finds the controller of another one alive is the spare: it takes over when nobody
renews that one's lock of the run (cluster/run_lock.py) any more. A requeued job whose earlier life was lost
with its node waits likewise, until it is clear that the lock which that has left is renewed no more.

While it waits it shows a sign, `RUN_DIR/jobs/spare.JOB.RESTARTS`, so that a controller whose job is to end
alone can leave the run to it (`hand_over`).
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from laminar_hpc.cluster.lock_owner import Watched
from laminar_hpc.cluster.run_end import last_word
from laminar_hpc.cluster.run_lock import RunLock, refuse_if_held
from laminar_hpc.cluster.waiting import Sign, shown_in
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.observability import console

ONE_WORLD_SECONDS = 60.0  # of one torchrun world, whose other nodes wait for the first one
_LOOK_SECONDS = 0.25
_SAY_AFTER_SECONDS = 15.0  # longer than the lock of a dead controller looks alive
_TOLD_AS_WELL_SECONDS = 4.0  # within which a job that is told of its end has taken its sign away
_DEATH_SECONDS = 5.0  # of a process whose parent was killed
_SIGNS = "spare.*"


class Turn(Enum):
    """What a job is to do after the wait."""

    START = "there is no other controller"
    OVER = "the run has ended meanwhile, as its last record says"
    TOLD = "the job itself is to end"


def other_lives(run_dir: Path) -> bool:
    """Whether a live controller holds the run."""
    try:
        refuse_if_held(run_dir)
    except Refused:
        return True
    return False


def await_turn(
    run_dir: Path,
    told: Callable[[], bool],
    seconds: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
    begin: Callable[[], None] = lambda: None,
    watched: Watched | None = None,
    sign: Sign | None = None,
) -> Turn:
    """Until no other controller lives, for at most so many seconds; whoever starts then is refused. Calls
    `begin` when there is something to wait for, and keeps in `watched` what it sees of the lock. `sign`: to
    be shown meanwhile."""
    watched = {} if watched is None else watched
    before, waited = last_word(run_dir), 0.0
    try:
        while waited < seconds:
            if told():
                return Turn.TOLD
            try:
                if refuse_if_held(run_dir, watched):
                    break
            except Refused as refused:
                if waited == _SAY_AFTER_SECONDS:
                    print(console.line("spare", str(refused).partition(",")[0]), flush=True)
                if sign:
                    sign.show(time.monotonic())
            if not waited:
                begin()
            sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
    finally:
        if sign:
            sign.take_away()
    now = last_word(run_dir)
    return Turn.OVER if waited and now and now != before else Turn.START


def spare_of(run_dir: Path, sleep: Callable[[float], None] = time.sleep) -> str:
    """Who waits to take over, as "spare 7 (pid 4711 of ...)"; "" if nobody does. Takes some seconds: one that
    is told to end in the same moment is none."""
    if not (first := shown_in(run_dir / "jobs", _SIGNS)):
        return ""
    sleep(_TOLD_AS_WELL_SECONDS)
    return next((who for who in shown_in(run_dir / "jobs", _SIGNS) if who in first), "")


def hand_over(run_dir: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Frees the lock of the run, whose holder was killed on this machine, so that the spare need not watch it
    for a while."""
    waited = 0.0
    while other_lives(run_dir) and waited < _DEATH_SECONDS:
        sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS
    with suppress(LaminarError, OSError):  # the spare was faster
        RunLock([run_dir], lambda _: None).release()
