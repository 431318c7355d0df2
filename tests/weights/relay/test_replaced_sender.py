"""A trainer that is stopped in the middle of a publication, is replaced, and wakes up: nothing of what it
still sends is ever to be seen."""

import os
import signal
import sys
import time

import pytest

from helpers.paths import BENCH

sys.path.insert(0, str(BENCH))
from chain_roles import ChainRun

SIZE = 12 << 20


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_zombie_s_bytes_never_become_visible(tmp_path):
    """Promise: docs/promises.md#roles-apart. The relays keep their weights and their link, and get those
    of the next trainer under a higher id. The controller sees the zombie by its silence, as on another
    machine."""
    words = "cluster.heartbeat_timeout_seconds=3", "relay.chunk_megabytes=1"
    run = ChainRun(tmp_path, 2, SIZE, *words)
    try:
        run.publish()
        run.wait([0, 1], 1, 60)
        before = [run.newest(0), run.newest(1)]
        assert before[0] == before[1]
        run.begin_to_publish()
        zombie = run.trainer_pid
        os.kill(zombie, signal.SIGSTOP)
        until = time.monotonic() + 20
        while "wait up to" not in run.said():
            assert time.monotonic() < until, run.said()
            time.sleep(0.05)
        (run.run_dir / "hold").unlink()
        os.kill(zombie, signal.SIGCONT)
        until = time.monotonic() + 2.5  # longer than what is left of the publication takes
        while time.monotonic() < until:
            assert [run.newest(0), run.newest(1)] == before
            time.sleep(0.05)
        run.replace_trainer(SIZE)
        run.publish()
        run.wait([0, 1], 3, 60)
        after = run.newest(0)
        assert after == run.newest(1) and after[1] == 3 and after[0] >= before[0][0] + 2
        run.until_chain([0, 1])
    finally:
        run.close()
