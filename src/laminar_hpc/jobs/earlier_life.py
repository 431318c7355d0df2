"""A requeued job whose earlier life was lost with its node. The controller's lock of the run
(cluster/run_lock.py) was renewed until then, so for some seconds it looks like that of a live controller
elsewhere, and the next one would be refused for good."""

import time
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.cluster.run_lock import FRESH_SECONDS, RENEW_SECONDS, refuse_if_held
from laminar_hpc.config.errors import Refused

_WAIT_SECONDS = FRESH_SECONDS + 2 * RENEW_SECONDS
_LOOK_SECONDS = 0.5


def await_its_end(run_dir: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Until the lock is not renewed any more. A controller that is alive goes on renewing it: whoever starts
    then says so."""
    for _ in range(round(_WAIT_SECONDS / _LOOK_SECONDS)):
        try:
            return refuse_if_held(run_dir)
        except Refused:
            sleep(_LOOK_SECONDS)
    return None
