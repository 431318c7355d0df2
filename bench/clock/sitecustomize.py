"""On PYTHONPATH of the jobs of bench/chaos.py: Python's clock of a node can be set.

The seconds in LAMINAR_CLOCK, a file in the node's own memory, are added to what time.time() and
time.time_ns() say, in every Python process of our roles and of SGLang. The kernel's clock, of which no node
has its own, and with it C++ and Slurm, is left as it is.
"""

import os
import time

_LOOK_SECONDS = 0.5
_FILE = os.environ.get("LAMINAR_CLOCK", "")
_real, _real_ns = time.time, time.time_ns


class _Ahead:
    """Looks at the file twice a second at most."""

    seconds, looked = 0.0, -_LOOK_SECONDS

    def now(self) -> float:
        if (moment := time.monotonic()) - self.looked >= _LOOK_SECONDS:
            self.looked = moment
            try:
                with open(_FILE) as file:
                    self.seconds = float(file.read())
            except (OSError, ValueError):  # not set, or being written
                self.seconds = 0.0
        return self.seconds


if _FILE:
    _ahead = _Ahead()
    time.time = lambda: _real() + _ahead.now()
    time.time_ns = lambda: _real_ns() + int(_ahead.now() * 1e9)
