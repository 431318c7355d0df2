"""A controller's job that finds the controller of another one alive is the spare: it takes over when nobody
renews that one's lock of the run (cluster/run_lock.py) any more. A requeued job whose earlier life was lost
with its node waits likewise, until it is clear that the lock which that has left is renewed no more.
"""

import math
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from laminar_hpc.cluster.lock_owner import Watched
from laminar_hpc.cluster.run_lock import refuse_if_held
from laminar_hpc.config.errors import Refused
from laminar_hpc.jobs.ending import last_word
from laminar_hpc.observability import console

ONE_WORLD_SECONDS = 60.0  # of one torchrun world, whose other nodes wait for the first one
_LOOK_SECONDS = 0.25
_SAY_AFTER_SECONDS = 15.0  # longer than the lock of a dead controller looks alive


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
) -> Turn:
    """Until no other controller lives, for at most so many seconds; whoever starts then is refused. Calls
    `begin` when there is something to wait for, and keeps in `watched` what it sees of the lock."""
    watched = {} if watched is None else watched
    before, waited = last_word(run_dir), 0.0
    while waited < seconds:
        if told():
            return Turn.TOLD
        try:
            if refuse_if_held(run_dir, watched):
                break
        except Refused as refused:
            if waited == _SAY_AFTER_SECONDS:
                print(console.line("spare", str(refused).partition(",")[0]), flush=True)
        if not waited:
            begin()
        sleep(_LOOK_SECONDS)
        waited += _LOOK_SECONDS
    now = last_word(run_dir)
    return Turn.OVER if waited and now and now != before else Turn.START
