"""The lock of a run directory: one holder, whatever starts at the same moment; stale locks are recognised,
others never broken."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from laminar_hpc.config.errors import Refused
from laminar_hpc.machine.locks import run_lock
from laminar_hpc.machine.locks.lease import LEASE_SHARE, Lease
from laminar_hpc.machine.locks.lock_owner import Owner, read_owner
from laminar_hpc.machine.locks.run_lock import LOCK_FILE, LockLost, RunLock, refuse_if_held
from laminar_hpc.machine.processes import process_world

HOLD = """
import sys, time
from pathlib import Path
from laminar_hpc.machine.locks.run_lock import RunLock
from laminar_hpc.config.errors import Refused
folder, go = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
while not go.exists():
    pass
try:
    RunLock([folder], lambda text: None)
except Refused:
    print("refused", flush=True)
else:
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder: Path, go: Path = Path("/")) -> subprocess.Popen[str]:
    """A process that takes the lock of `folder` as soon as `go` exists, and says `held` or `refused`."""
    command = [sys.executable, "-c", HOLD, str(folder), str(go)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert says(process) == "ready"
    return process


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def lock_of_another_host(folder: Path, age: float, stale_after: float = 8.0) -> Path:
    """A lock that a process on a host that is not this one renewed so many seconds ago."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    path.write_bytes(
        msgspec.json.encode(
            Owner("far", "ann", "node7", 4711, "1", "boot pid:[1]", time.time() - 3600, stale_after)
        )
    )
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def quick(monkeypatch):
    """The same rules with shorter times."""
    for name, seconds in (("STALE", 0.8), ("_LOOK", 0.05)):
        monkeypatch.setattr(run_lock, f"{name}_SECONDS", seconds)


def test_a_held_lock_refuses_and_says_who_holds_it(tmp_path):
    """Promise: who comes second is told user, PID, host and time, and the lock stays as it is."""
    holder = hold(tmp_path)
    try:
        assert says(holder) == "held"
        before = (tmp_path / LOCK_FILE).read_bytes()
        for second in (lambda: refuse_if_held(tmp_path), lambda: RunLock([tmp_path], print)):
            with pytest.raises(
                Refused,
                match=rf"{tmp_path} is in use by a live run \(pid {holder.pid} of \S+ on \S+, since 20",
            ):
                second()
        assert (tmp_path / LOCK_FILE).read_bytes() == before and left_in(tmp_path) == {LOCK_FILE}
    finally:
        holder.kill()
        holder.wait()


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path):
    """Promise: after SIGKILL on this machine nobody has to wait or to clean up, and one line says whose lock
    it was."""
    holder, lines = hold(tmp_path), []
    assert says(holder) == "held"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    refuse_if_held(tmp_path)
    begun = time.monotonic()
    lock = RunLock([tmp_path], lines.append)
    assert time.monotonic() - begun < 1 and len(lines) == 1 and f"pid {holder.pid} of" in lines[0]
    with pytest.raises(Refused):
        refuse_if_held(tmp_path)
    lock.release()
    assert left_in(tmp_path) == set()


@pytest.mark.parametrize("stale", [False, True], ids=["free", "stale"])
@pytest.mark.timeout(120)
def test_of_many_starts_at_the_same_moment_one_wins(tmp_path, stale):
    """Promise: exactly one of six processes holds the lock, whether it was free or left behind by a dead
    process."""
    folder, go = tmp_path / "run", tmp_path / "go"
    if stale:
        dead = hold(folder)
        assert says(dead) == "held"
        dead.kill()
        dead.wait()
    processes = [hold(folder, go) for _ in range(6)]
    go.touch()
    try:
        assert sorted(says(process) for process in processes) == ["held", *["refused"] * 5]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert left_in(folder) == {LOCK_FILE}


def test_takeovers_by_many_threads_never_overlap(tmp_path, monkeypatch):
    """Promise: with a pause before every step of a takeover, at most one holds the lock at any time, over
    many rounds."""
    real_create, real_read = run_lock._create, run_lock.read_owner

    def slowly(function):
        def run(*arguments):
            time.sleep(int.from_bytes(os.urandom(1)) / 1e5)
            return function(*arguments)

        return run

    monkeypatch.setattr(run_lock, "_create", slowly(real_create))
    monkeypatch.setattr(run_lock, "read_owner", slowly(real_read))
    alive: set[str] = set()
    holders: set[str] = set()
    most, wins, guard = 0, 0, threading.Lock()

    def new_token(_: int) -> str:
        token = os.urandom(8).hex()
        alive.add(token)
        return token

    monkeypatch.setattr(run_lock.secrets, "token_hex", new_token)
    monkeypatch.setattr(run_lock, "is_alive", lambda owner, *_: owner.token in alive)

    def contend() -> None:
        nonlocal most, wins
        for _ in range(40):
            try:
                owner = run_lock.take(tmp_path, lambda text: None, 8.0, Lease(8.0), {})
            except Refused:
                continue
            with guard:
                holders.add(owner.token)
                most, wins = max(most, len(holders)), wins + 1
            time.sleep(0.001)
            with guard:
                holders.discard(owner.token)
            alive.discard(owner.token)  # dies: the lock stays behind

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1 and wins > 20


def test_another_hosts_lock_is_held_while_it_is_renewed(tmp_path):
    """Promise: a process elsewhere counts as alive by its renewals, and the refusal names the file to
    remove."""
    path = lock_of_another_host(tmp_path, age=3, stale_after=600.0)
    with pytest.raises(
        Refused, match=rf"on node7, since .* 3 s ago: if you know that it is gone, .*remove {path}"
    ):
        refuse_if_held(tmp_path)
    with pytest.raises(Refused):
        RunLock([tmp_path], print)
    assert left_in(tmp_path) == {LOCK_FILE}


def test_another_users_lock_is_held_while_it_is_renewed(tmp_path):
    """Promise: the same of another user's process on this machine, which /proc may hide (hidepid)."""
    owner = Owner("far", "ann", socket.gethostname(), 0, "1", process_world(), time.time(), 600.0)
    (tmp_path / LOCK_FILE).write_bytes(msgspec.json.encode(owner))
    with pytest.raises(Refused, match=r"pid 0 of ann on .* its last sign of life"):
        refuse_if_held(tmp_path)


def test_another_hosts_lock_that_is_renewed_no_more_is_taken_over(tmp_path, quick):
    """Promise: it is stale when it stays as it is while it is watched for the time that it says itself,
    whatever the clocks say; a line says that we wait."""
    lock_of_another_host(tmp_path, age=-86_400, stale_after=0.8)
    refuse_if_held(tmp_path)
    lines: list[str] = []
    lock = RunLock([tmp_path], lines.append)
    assert len(lines) == 2 and "not renewed lately" in lines[0] and "on node7" in lines[1]
    lock.release()


def test_another_hosts_lock_that_is_renewed_late_is_left_alone(tmp_path, quick):
    """Promise: clocks that differ break no lock: one that looks a day old is not stale if it changes while we
    watch."""
    path = lock_of_another_host(tmp_path, age=86_400, stale_after=60.0)
    timer = threading.Timer(0.1, lambda: os.utime(path, (time.time() - 80_000, time.time() - 80_000)))
    timer.start()
    with pytest.raises(Refused):
        RunLock([tmp_path], print)
    timer.join()


def test_the_holder_renews_its_lock(tmp_path, quick):
    """Promise: the time of the file goes on by itself."""
    lock = RunLock([tmp_path], print)
    path = tmp_path / LOCK_FILE
    os.utime(path, (1, 1))
    assert _soon(lambda: path.stat().st_mtime > 1)
    lock.release()


def test_the_holder_notices_the_loss_of_its_lock(tmp_path):
    """Promise: a lock removed by hand comes back; one that another run took ends this one."""
    lock = RunLock([tmp_path], print, stale_after=600.0)
    [held] = lock._held.values()
    path = tmp_path / LOCK_FILE
    path.unlink()
    assert held.renew() == "" and path.exists() and lock.is_sure
    lock_of_another_host(tmp_path, age=0)
    lock.lost = held.renew()
    assert "another run" in lock.lost and "node7" in lock.lost
    with pytest.raises(LockLost, match="node7"):
        lock.assure()
    lock.release()
    assert path.exists(), "the other run's lock stays"


class Clock:
    """Of one machine: it can be set forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_holder_is_sure_for_less_time_than_others_wait():
    """Promise (docs/promises.md#one-controller): a holder counts from the beginning of a renewal, and one
    that ends too late counts for nothing."""
    clock = Clock()
    lease = Lease(8.0, clock)
    assert not lease.is_sure and lease.has_run_out
    lease.taken(lease.begin())
    assert lease.is_sure
    begun = lease.begin()
    clock.now += 5.0
    lease.renewed(begun)  # a slow file system
    clock.now += 8.0 * LEASE_SHARE - 5.0
    assert not lease.is_sure and lease.has_run_out
    lease.renewed(lease.begin())
    assert not lease.is_sure, "others may have succeeded it"


def test_who_took_a_lock_slowly_waits_until_the_one_before_has_noticed():
    """Promise (docs/promises.md#one-controller): whoever stood still half-way through a takeover may have
    been succeeded, and have replaced the lock of its successor: it does nothing before that one is unsure."""
    clock = Clock()
    lease = Lease(8.0, clock)
    begun = lease.begin()
    clock.now += 60.0
    lease.taken(begun)
    lease.taken(lease.begin())
    assert not lease.is_sure
    clock.now += 5.9
    lease.taken(lease.begin())
    assert not lease.is_sure
    clock.now += 2.2
    assert lease.is_sure


def standing_still(lock: RunLock, seconds: float) -> None:
    """As if the process had been stopped for so long."""
    for held in lock._held.values():
        held.lease._sure_until -= seconds


def test_a_holder_that_stood_still_takes_its_lock_again(tmp_path):
    """Promise (docs/promises.md#one-controller): a holder that could not renew in time is unsure at once,
    and sure again when it has succeeded itself as any other would."""
    lock = RunLock([tmp_path], print, stale_after=60.0)
    [held] = lock._held.values()
    before = read_owner(tmp_path / LOCK_FILE)
    standing_still(lock, 60.0)
    assert not lock.is_sure
    assert held.renew() == "" and lock.is_sure
    after = read_owner(tmp_path / LOCK_FILE)
    assert before and after and before[0].token != after[0].token and left_in(tmp_path) == {LOCK_FILE}
    lock.assure()
    lock.release()
    assert left_in(tmp_path) == set()


@pytest.mark.parametrize("successor", ["half-way", "done", "done and gone"])
def test_a_holder_that_stood_still_and_was_succeeded(tmp_path, successor):
    """Promise (docs/promises.md#one-controller): it never takes its lock again from a successor, be that
    about to come, there, or gone again."""
    lock = RunLock([tmp_path], print, stale_after=60.0)
    [held] = lock._held.values()
    standing_still(lock, 60.0)
    path = tmp_path / LOCK_FILE
    if successor == "half-way":
        place = tmp_path / f"{LOCK_FILE}.{held.owner.token}"
        lock_of_another_host(tmp_path / "far", age=0).rename(place)
        assert held.renew() == "" and not lock.is_sure
        place.replace(path)
    elif successor == "done":
        lock_of_another_host(tmp_path, age=0)
    else:
        path.unlink()
    assert ("node7" in held.renew()) == (successor != "done and gone")
    assert held.renew() and not lock.is_sure
    lock.lost = held.renew()
    with pytest.raises(LockLost):
        lock.assure()
    lock.release()
    assert path.exists() == (successor != "done and gone"), "the successor's lock stays"


def test_who_waits_to_be_sure_goes_on(tmp_path):
    """Promise (docs/promises.md#standstill): a loop that waits for the lock is not taken for one that
    stands still, as it keeps the lock from nobody."""
    lock, waits = RunLock([tmp_path], print, stale_after=600.0), list[bool]()
    [held] = lock._held.values()
    standing_still(lock, 600.0)

    def at_work() -> None:
        waits.append(lock.is_sure)
        if len(waits) == 3:
            assert held.renew() == ""

    lock.at_work = at_work
    lock.assure()
    assert waits == [False] * 3
    lock.release()


def test_a_holder_that_gives_up_keeps_nobody_out(tmp_path, monkeypatch):
    """Promise (docs/promises.md#standstill): it is sure no more at once, renews no more, and another one,
    which cannot see its process, takes over after the time that it waits for any; whatever the first one does
    when it goes on meets LockLost."""
    owner = Owner("far", "ann", "n7", 4711, "1", "boot pid:[1]", time.time(), 1.0)
    before = set(threading.enumerate())
    with monkeypatch.context() as far:
        far.setattr(Owner, "this_process", staticmethod(lambda stale_after: owner))
        first = RunLock([tmp_path], print, stale_after=1.0)
    [renews] = set(threading.enumerate()) - before
    first.give_up("its loop stands still")
    assert not first.is_sure
    renews.join(30)
    assert not renews.is_alive()
    os.utime(tmp_path / LOCK_FILE, (1, 1))  # not fresh: the second one watches it
    second = RunLock([tmp_path], print)
    assert second.is_sure and not first.is_sure
    with pytest.raises(LockLost, match="its loop stands still"):
        first.assure()
    first.release()
    assert second.is_sure and (tmp_path / LOCK_FILE).exists(), "the successor's lock stays"
    second.release()


def test_a_folder_that_is_moved_leaves_its_lock(tmp_path):
    """Promise: when an earlier run is moved aside, the lock holds for the new folder and none is left in the
    old one."""
    run, old = tmp_path / "run", tmp_path / "run.1"
    lock = RunLock([run, tmp_path / "store"], print)
    run.rename(old)
    lock.moved(run, old)
    assert left_in(old) == set() and left_in(run) == {LOCK_FILE}
    with pytest.raises(Refused):
        RunLock([tmp_path / "other", tmp_path / "store"], print)
    assert left_in(tmp_path / "other") == set(), "what was taken before the refusal is released"
    lock.release()


def test_without_hard_links(tmp_path, monkeypatch):
    """Promise: file systems without hard links (FUSE, exFAT) are locked as well, by exclusive creation."""

    def link(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    lock = RunLock([tmp_path], print)
    with pytest.raises(Refused):
        RunLock([tmp_path], print)
    lock.release()
    assert left_in(tmp_path) == set()


def _soon(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
