"""A controller's job that finds the lock of another controller."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from laminar_hpc.cluster.lock_owner import Owner
from laminar_hpc.cluster.run_lock import LOCK_FILE, refuse_if_held
from laminar_hpc.config.errors import Refused
from laminar_hpc.jobs import node
from laminar_hpc.jobs.ending import is_final
from laminar_hpc.jobs.node import Place, run_in_turn
from laminar_hpc.jobs.spare import Turn, await_turn, other_lives


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Of a controller on another machine, renewed just now."""
    lock = tmp_path / LOCK_FILE
    lock.write_bytes(held_by_another(stale_after=600.0))
    return lock


def held_by_another(stale_after: float) -> bytes:
    owner = Owner("far", "ann", "n7", 4711, "1", "boot pid:[1]", time.time(), stale_after)
    return msgspec.json.encode(owner)


def wait(run_dir: Path, look: Callable[[int], None], told: Callable[[], bool] = lambda: False) -> Turn:
    """`look(n)`: what happens after the n-th look."""
    looks = list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 1000
        look(len(looks))

    return await_turn(run_dir, told, sleep=sleep)


def end(run_dir: Path, reason: str) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "end", "reason": reason}, separators=(",", ":")) + "\n")


def test_the_lock_of_a_lost_node_is_waited_for(tmp_path: Path, lock: Path) -> None:
    """Promise (docs/architecture.md#failure-domains): a controller that Slurm has started on another node
    within seconds is not refused because of the one that its node's end has killed, nor does it take a lock
    of which it is not yet clear that nobody renews it."""
    end(tmp_path, "SIGUSR1")  # long ago
    with pytest.raises(Refused):
        refuse_if_held(tmp_path)
    lock.write_bytes(held_by_another(stale_after=0.2))
    lost = time.time() - 30
    os.utime(lock, times=(lost, lost))
    looks = list[int]()

    def look(n: int) -> None:
        looks.append(n)
        time.sleep(0.06)

    assert wait(tmp_path, look) is Turn.START
    assert looks and lock.exists()  # for the controller to take over


def test_the_spare_takes_over(tmp_path: Path, lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise (docs/architecture.md#failure-domains): a second controller's job waits as long as the first
    one's lives, and starts when that has died without a word."""

    def look(n: int) -> None:
        os.utime(lock)
        if n == 200:
            lock.unlink()

    assert wait(tmp_path, look) is Turn.START
    assert capsys.readouterr().out.splitlines() == [
        f"spare        {tmp_path} is in use by a live run (pid 4711 of ann on n7"
    ]


def test_a_lock_that_was_renewed_and_is_no_more(tmp_path: Path, lock: Path) -> None:
    """Promise: the spare takes over from a controller that it has seen alive, without waiting for its lock to
    be removed."""
    lock.write_bytes(held_by_another(stale_after=0.3))
    lost = time.time() - 30
    os.utime(lock, times=(lost, lost))

    def look(n: int) -> None:
        if n <= 3:
            renewed = lost + n  # another time of the file: it lives
            os.utime(lock, times=(renewed, renewed))
        time.sleep(0.06)

    assert wait(tmp_path, look) is Turn.START and lock.exists()


@pytest.mark.parametrize(("word", "again"), [("done", False), ("failed: no room", False), ("SIGUSR1", True)])
def test_a_spare_is_not_needed_any_more(tmp_path: Path, lock: Path, word: str, again: bool) -> None:
    """Promise: when the run ends the spare's job ends with the others, and is requeued if they are."""

    def look(n: int) -> None:
        end(tmp_path, word)
        lock.unlink()

    assert wait(tmp_path, look) is Turn.OVER and is_final(word) is not again


def test_a_spare_that_is_told_to_end_is_requeued(tmp_path: Path, lock: Path) -> None:
    """Promise: at preemption, or before its time limit, it makes room at once, and comes back."""
    place = Place("controller", 0, 1, tmp_path, "7.0", None)
    place.file("end").parent.mkdir()
    place.file("end").write_text("now\n")
    assert run_in_turn(place, lambda: pytest.fail("it has started")) == (0, True)


def test_two_that_begin_at_once(tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the one whose controller was refused, as that of the other job was faster, is the spare."""
    held, starts = lock.read_bytes(), list[int]()
    lock.unlink()

    def started() -> dict[str, list[str]]:
        starts.append(len(starts))
        if starts == [0]:
            lock.write_bytes(held)
        return {"controller": [sys.executable, "-c", f"raise SystemExit({2 if starts == [0] else 0})"]}

    def dies(run_dir: Path) -> bool:
        lived = other_lives(run_dir)
        lock.unlink()
        return lived

    monkeypatch.setattr(node, "other_lives", dies)
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    before = [signal.getsignal(number) for number in numbers]
    try:
        assert run_in_turn(Place("controller", 0, 1, tmp_path, "7.0", None), started) == (0, False)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert starts == [0, 1]
