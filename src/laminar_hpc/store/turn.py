"""The spare: a controller that finds the one of another job alive, and takes over when nobody renews that
one's lock of the run (machine/locks/run_lock.py) any more. One that starts again after its node was lost
waits likewise, until it is clear that the lock which it has left is renewed no more. It has its imports done
by then.

While it waits it shows a sign, so that a controller whose job is to end alone can leave the run to it
(launch/slurm/spare.py).
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.config.errors import Refused
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.waiting import Sign
from laminar_hpc.machine.locks.lock_owner import Watched
from laminar_hpc.machine.locks.run_lock import refuse_if_held
from laminar_hpc.machine.observability import console
from laminar_hpc.store.run_end import last_word

ONE_WORLD_SECONDS = 60.0  # of one world, whose other ranks wait for its controller
_LOOK_SECONDS = 0.25
_SAY_AFTER_SECONDS = 15.0  # longer than the lock of a dead controller looks alive


def await_turn(
    run_dir: Path,
    say: Callable[[str], None],
    sign: Sign | None,
    seconds: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> Watched:
    """Waits until no other controller lives, for at most so many seconds; whoever starts then is refused.
    Returns what it has seen of the lock, which then need not be watched once more. Raises StopReceived when
    the run has ended meanwhile."""
    watched, before, waited = Watched(), last_word(run_dir), 0.0
    try:
        while waited < seconds:
            try:
                if refuse_if_held(run_dir, watched):
                    break
            except Refused as refused:
                if waited == _SAY_AFTER_SECONDS:
                    say(console.line("spare", str(refused).partition(",")[0]))
                if sign:
                    sign.show(time.monotonic())
            sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
    finally:
        if sign:
            sign.take_away()
    now = last_word(run_dir)
    if waited and now and now != before:
        raise StopReceived(now)
    return watched
