"""A controller's job that finds the lock of another controller."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from helpers.stand_ins import JOINED, STAND_IN, one_rank
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.load import load_config
from laminar_hpc.controller import beginning
from laminar_hpc.controller.run import hear
from laminar_hpc.launch import launch, ranks
from laminar_hpc.launch.launch_role import RoleGroup
from laminar_hpc.launch.slurm import node
from laminar_hpc.launch.slurm.ending import is_final
from laminar_hpc.launch.slurm.node import NodePlace, run_node
from laminar_hpc.launch.slurm.spare import spare_of
from laminar_hpc.line.agent_line import VARIABLE
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.waiting import Sign
from laminar_hpc.machine.locks.lock_owner import Owner
from laminar_hpc.machine.locks.run_lock import LOCK_FILE, refuse_if_held
from laminar_hpc.store.turn import await_turn


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A node has handlers of its own."""
    monkeypatch.setattr(ranks, "_RANK", STAND_IN)
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Of a controller on another machine, renewed just now."""
    lock = tmp_path / LOCK_FILE
    lock.write_bytes(held_by_another(stale_after=600.0))
    return lock


def held_by_another(stale_after: float) -> bytes:
    owner = Owner("far", "ann", "n7", 4711, "1", "boot pid:[1]", time.time(), stale_after)
    return msgspec.json.encode(owner)


def sign_of_a_spare(run_dir: Path) -> Sign:
    """Of job 8, which is this process."""
    (run_dir / "jobs").mkdir(exist_ok=True)
    sign = Sign(run_dir / "jobs" / "spare.8.0")
    sign.show(0.0)
    return sign


def wait(run_dir: Path, look: Callable[[int], None]) -> list[str]:
    """What is said; `look(n)`: what happens after the n-th look."""
    looks, said = list[float](), list[str]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 1000
        look(len(looks))

    await_turn(run_dir, said.append, Sign(run_dir / "jobs" / "spare.8.0"), sleep=sleep)
    return said


def end(run_dir: Path, reason: str) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "end", "reason": reason}, separators=(",", ":")) + "\n")


def test_the_lock_of_a_lost_node_is_waited_for(tmp_path: Path, lock: Path) -> None:
    """Promise (docs/promises.md#failure-domains): a controller that Slurm has started on another node
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

    wait(tmp_path, look)
    assert looks and lock.exists()  # for the controller to take over


def test_the_spare_takes_over(tmp_path: Path, lock: Path) -> None:
    """Promise (docs/promises.md#failure-domains): a second controller's job waits as long as the first
    one's lives, and starts when that has died without a word."""

    def look(n: int) -> None:
        os.utime(lock)
        if n == 200:
            lock.unlink()

    assert wait(tmp_path, look) == [f"spare        {tmp_path} is in use by a live run (pid 4711 of ann on n7"]


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

    wait(tmp_path, look)
    assert lock.exists()


@pytest.mark.parametrize(("word", "again"), [("done", False), ("failed: no room", False), ("SIGUSR1", True)])
def test_a_spare_is_not_needed_any_more(tmp_path: Path, lock: Path, word: str, again: bool) -> None:
    """Promise: when the run ends the spare's job ends with the others, and is requeued if they are."""

    def look(n: int) -> None:
        end(tmp_path, word)
        lock.unlink()

    with pytest.raises(StopReceived):
        wait(tmp_path, look)
    assert is_final(word) is not again


def test_a_spare_that_is_told_to_end_is_requeued(tmp_path: Path, lock: Path) -> None:
    """Promise: at preemption, or before its time limit, it makes room at once, and comes back."""
    place = NodePlace("controller", 0, 1, tmp_path, "7.0", None)
    place.file("end").parent.mkdir()
    place.file("end").write_text("now\n")
    assert run_node(place, [one_rank("controller", tmp_path, "import time; time.sleep(100)")]) == (0, True)


def test_two_that_begin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the one whose controller found the lock taken, as that of the other job was faster, is the
    spare."""
    waits, refusals = list[object](), [Refused(["in use"]), LaminarError("tried again")]

    def lock(*_: object, **__: object) -> None:
        raise refusals.pop(0)

    monkeypatch.setattr(beginning, "RunLock", lock)
    monkeypatch.setattr(beginning, "await_turn", lambda *_: waits.append(None) or {})
    config = load_config(["experiment=demo", "role=controller", f"run_dir={tmp_path}"])
    for spare, count in (("jobs/spare.7.0", 2), ("", 0)):
        monkeypatch.setenv(VARIABLE, json.dumps({"spare": spare}))
        with pytest.raises(LaminarError, match="tried again"):
            beginning.start_up(config, lambda _: None)
        assert len(waits) == count
        waits.clear()
        refusals.append(LaminarError("tried again"))


ENDS = """
import sys
open(sys.argv[1], "a").write('{"kind":"end","reason":"%s"}\\n' % sys.argv[2])
sys.exit(sys.argv[2].startswith("failed"))
"""


def test_a_run_that_is_over_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Promise: a job that waits for the others' jobs (slurm/common.sh), or starts later, ends as well; one
    whose controller has died without a word, or failed in an earlier life of the run, leaves that to the
    spare."""
    place, failed = NodePlace("controller", 0, 1, tmp_path, "7.0", None), tmp_path / "jobs/failed"
    failed.parent.mkdir()
    end(tmp_path, "failed: earlier")
    assert run_node(place, [one_rank("controller", tmp_path, "raise SystemExit(1)")]) == (1, False)
    assert not failed.exists()
    for reason, code, again in ("failed: no rollout", 1, False), ("SIGUSR1", 0, True), ("done", 0, False):
        ends = one_rank("controller", tmp_path, ENDS, str(tmp_path / "metrics.jsonl"), reason)
        assert run_node(place, [ends]) == (code, again)
        assert failed.exists() and (failed.parent / "ended").exists() == (reason == "done")


def test_a_spare_shows_a_sign_as_long_as_it_waits(tmp_path: Path, lock: Path) -> None:
    """Promise: whoever wants to leave the run to it sees it, and only while it would take over."""
    seen = list[str]()

    def look(n: int) -> None:
        seen.append(spare_of(tmp_path, sleep=lambda _: None))
        lock.unlink()

    wait(tmp_path, look)
    assert seen == [f"spare 8 (pid {os.getpid()}{seen[0].partition(str(os.getpid()))[2]}"]
    assert spare_of(tmp_path, sleep=lambda _: None) == ""


def test_a_spare_whose_time_is_over_as_well_is_none(tmp_path: Path) -> None:
    """Promise: a controller does not leave the run to a spare that is told to end in the same moment."""
    sign = sign_of_a_spare(tmp_path)
    assert spare_of(tmp_path, sleep=lambda _: sign.take_away()) == ""


HOLDER = f"""{JOINED}
import sys, time
from pathlib import Path
from laminar_hpc.machine.locks.run_lock import RunLock
lock = RunLock([Path(sys.argv[1])], print)
Path(sys.argv[2]).write_text("now")
time.sleep(1000)
"""


def test_a_controller_leaves_the_run_to_a_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise (docs/promises.md#failure-domains): when only its own job is to end, no other job is; its
    controller, which has taken the lock, ends, the lock is free for the spare, and the job is requeued, to be
    the spare."""
    monkeypatch.setattr("laminar_hpc.launch.slurm.spare._TOLD_AS_WELL_SECONDS", 0.0)
    sign_of_a_spare(tmp_path)
    place = NodePlace("controller", 0, 1, tmp_path, "7.0", None)
    holder = one_rank("controller", tmp_path, HOLDER, str(tmp_path), str(place.file("end")))
    assert run_node(place, [holder]) == (0, True)
    assert not (tmp_path / LOCK_FILE).exists() and "spare 8 (pid" in capsys.readouterr().out


def test_a_controller_s_own_ear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: where Slurm sends TERM to all processes of a job the controller leaves it to its node to say
    what that means; elsewhere TERM stops the run."""
    for deaf in (False, True):
        heard = list[str]()
        monkeypatch.setenv(VARIABLE, '{"deaf_to_term":true}' if deaf else "{}")
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            hear(number, heard)
        assert heard == [*([] if deaf else ["SIGTERM"]), "SIGUSR1", "SIGINT"]


def test_near_the_limit_the_run_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the time of jobs that were submitted together is over together; there, and where a job has
    several components, a controller stops the run although there is a spare."""
    sign_of_a_spare(tmp_path)
    end(tmp_path, "SIGUSR1")
    for place in (
        NodePlace("controller", 0, 1, tmp_path, "7.0", time.time() + 60, False),
        NodePlace("controller", 0, 1, tmp_path, "9.0", None, True),
    ):
        told, asked = f"{JOINED}import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch()", list[object]()
        group = one_rank("controller", tmp_path, f"{told}; time.sleep(100)", str(tmp_path / "up"))

        def ask(*words: object, group: RoleGroup = group, asked: list[object] = asked) -> bool:
            asked.append(words)
            group.life.signal(signal.SIGKILL)
            return True

        monkeypatch.setattr(launch, "request_stop", ask)
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        (tmp_path / "up").unlink()
        group.look()
        place.file("end").write_text("limit" if place.ends_at else "now")
        started = node.Node(place, [group])
        assert started.run() == 1 and len(asked) == 1 and not started.gave_way
