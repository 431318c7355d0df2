"""A requeued controller and the lock that its earlier life has left."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from laminar_hpc.cluster.run_lock import LOCK_FILE, Owner, refuse_if_held
from laminar_hpc.config.errors import Refused
from laminar_hpc.jobs.earlier_life import await_its_end


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Of a controller on another machine, renewed just now."""
    lock = tmp_path / LOCK_FILE
    lock.write_bytes(msgspec.json.encode(Owner("far", "ann", "n7", 4711, "1", "boot pid:[1]", time.time())))
    return lock


def test_the_lock_of_a_lost_node_is_waited_for(tmp_path: Path, lock: Path) -> None:
    """Promise (docs/architecture.md#failure-domains): a controller that Slurm has started on another node
    within seconds is not refused because of the one that its node's end has killed."""
    with pytest.raises(Refused):
        refuse_if_held(tmp_path)
    looks = list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        os.utime(lock, times=(time.time() - 4.0 * len(looks),) * 2)

    await_its_end(tmp_path, sleep)
    assert 3 <= len(looks) <= 4  # FRESH_SECONDS is 12
    refuse_if_held(tmp_path)


def test_a_live_controller_is_left_alone(tmp_path: Path, lock: Path) -> None:
    """Promise: one that goes on renewing its lock is waited for some seconds only, and then refuses the
    next one."""
    looks = list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        os.utime(lock)

    await_its_end(tmp_path, sleep)
    assert 12.0 < sum(looks) < 60.0
    with pytest.raises(Refused):
        refuse_if_held(tmp_path)
