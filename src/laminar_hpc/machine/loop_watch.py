"""A thread that sees that a loop of this process stands still: all stacks go to the log, then its owner is
told, once for each standstill.

Used by rollout/role.py and controller/standstill.py. A process that was stopped
as a whole stood still with its watch, which counts only time in which it ran itself.
"""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)
_LOOKS = 20  # in the time of the limit
_TIMES_SLOWEST = 20.0  # a turn that takes so many times the slowest one stands still


class LoopWatch:
    """`turned` is called by the loop, once per turn; `stuck(text)` in the watch's thread, with what to say.

    The limit is `_TIMES_SLOWEST` times the slowest turn so far, at least `least` and at most `most`
    seconds. `writes`: stacks and a line to the log, for which it may have to wait."""

    def __init__(
        self, name: str, least: float, most: float, stuck: Callable[[str], None], writes: bool = True
    ) -> None:
        self._writes = writes
        self._name = name
        self._least = least
        self._most = most
        self._stuck = stuck
        self._slowest = self._standing = 0.0
        self._turned_at = time.monotonic()
        self._said = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)
        self._thread.start()

    @property
    def limit(self) -> float:
        """Seconds for one turn."""
        return min(self._most, max(self._least, _TIMES_SLOWEST * self._slowest))

    def turned(self) -> None:
        """The loop goes round. A turn that stood still is not what is normal."""
        if not self._said:
            self._slowest = max(self._slowest, self._standing)
        self._standing = 0.0
        self._said = False
        self._turned_at = time.monotonic()

    def close(self) -> None:
        self._end.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        pause, looked = self._least / _LOOKS, time.monotonic()
        while not self._end.wait(pause):
            now = time.monotonic()
            self._standing += min(now - max(looked, self._turned_at), 2 * pause)
            looked = now
            if self._standing > self.limit and not self._said:
                self._said = True
                text = f"{self._name} has not turned for {self._standing:.0f} s"
                if self._writes:
                    faulthandler.dump_traceback(sys.stderr, all_threads=True)
                    text += "; its stacks are in the log"
                    log.error(text)
                self._stuck(text)
