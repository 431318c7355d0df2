"""docs/promises.md#standstill: a controller whose loop blocks ends by itself."""

import subprocess
import sys
from pathlib import Path

from laminar_hpc.config.system_schema import ClusterConfig
from laminar_hpc.controller.standstill import hung_seconds
from laminar_hpc.machine.locks.run_lock import RunLock

BLOCKS = """
import sys, threading
from pathlib import Path
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.config.system_schema import ClusterConfig
from laminar_hpc.controller import standstill
standstill.hung_seconds = lambda cluster: 0.5
terminal = threading.Lock()

def say(text):
    with terminal:
        print(text, flush=True)

lock = RunLock([Path(sys.argv[1])], print)
still = standstill.Standstill(ClusterConfig(), lock, say)
still.turned()
if sys.argv[2] == "says":
    terminal.acquire()  # the loop waits for its terminal, as the last word will
standstill._LAST_WORD_SECONDS = 0.5
threading.Event().wait()
"""


def test_a_loop_that_blocks_ends_its_process(tmp_path: Path) -> None:
    """Promise: with a last word, or without where that cannot be said; the lock is then free."""
    for how in ("waits", "says"):
        words = [sys.executable, "-c", BLOCKS, str(tmp_path), how]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert ("another one can take over" in done.stdout) == (how == "waits"), done.stdout + done.stderr
        RunLock([tmp_path], print).release()


def test_the_others_still_wait_when_it_ends() -> None:
    """Promise: half of the time for which they wait for a controller is left for the next one; turns of
    seconds are normal."""
    assert hung_seconds(ClusterConfig()) == 150.0
    assert hung_seconds(ClusterConfig(join_timeout_seconds=600.0)) == 300.0
    assert hung_seconds(ClusterConfig(join_timeout_seconds=20.0)) == 60.0
