"""What becomes of a controller whose loop stands still. It says so; when no turn has ended for
`hung_seconds`, it gives up the lock of the run and ends, so that another controller can take over: its other
threads would renew the lock for ever.

Other roles wait for a controller as long as `cluster.join_timeout_seconds`; half of that is left for the next
one. A turn that may take longer, as it writes archived responses back, says that it goes on; one that waits
to be sure of the lock keeps it from nobody.
"""

import logging
import os
import threading
from collections.abc import Callable

from laminar_hpc.config.system_schema import ClusterConfig
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.machine.loop_watch import LoopWatch
from laminar_hpc.machine.observability import console

log = logging.getLogger(__name__)
_NAME = "the controller's loop"
_TURN_SECONDS = 10.0  # of the loop at least, before it is said to stand still
_HUNG_SECONDS = 60.0  # at least; turns of seconds are normal on a busy machine
_LAST_WORD_SECONDS = 5.0  # the log and the terminal may be what the loop waits for


def hung_seconds(cluster: ClusterConfig) -> float:
    """How long a turn may take without a sign of progress."""
    return max(_HUNG_SECONDS, cluster.join_timeout_seconds / 2)


class Standstill:
    """Counts from its making on. `turned` is called after each turn, and in a long one."""

    def __init__(self, cluster: ClusterConfig, lock: RunLock, say: Callable[[str], None]) -> None:
        self._lock = lock
        self._say = say
        most, hung = max(_TURN_SECONDS, cluster.heartbeat_timeout_seconds / 2), hung_seconds(cluster)
        self._watches = (
            LoopWatch(_NAME, _TURN_SECONDS, most, self._say_stuck),
            LoopWatch(_NAME, hung, hung, self._end, writes=False),
        )
        lock.at_work = self.turned

    def turned(self) -> None:
        for watch in self._watches:
            watch.turned()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()

    def _say_stuck(self, text: str) -> None:
        self._say(console.line("warning", f"{text} (logs/controller0.log)"))

    def _end(self, text: str) -> None:
        self._lock.give_up(text)
        last = threading.Timer(_LAST_WORD_SECONDS, os._exit, [1])
        last.daemon = True
        last.start()
        text = f"{text}: the controller ends, and another one can take over"
        log.error(text)
        self._say(console.line("warning", text))
        os._exit(1)
