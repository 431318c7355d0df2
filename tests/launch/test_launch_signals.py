"""What a launcher makes of a signal."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.stand_ins import STAND_IN, one_rank
from laminar_hpc.launch import launch, launch_role, ranks
from laminar_hpc.launch.launch import NodeAgent
from laminar_hpc.launch.slurm import node
from laminar_hpc.line import stop
from laminar_hpc.line.address import new_address, write_address
from laminar_hpc.machine.locks.run_lock import RunLock


@pytest.mark.parametrize(("lives", "store_id"), [(True, "s"), (True, ""), (False, "s")])
def test_a_controller_in_a_long_turn_is_asked_to_stop(tmp_path, monkeypatch, lives, store_id):
    """Promise (docs/promises.md#failure-domains): a signal is an order to finish the step and to write a
    checkpoint also when the controller does not answer for some seconds; one that is dead, or not ready yet,
    is not waited for."""
    now, looks = [0.0], []

    def is_sent(*_: object) -> bool:
        now[0] += 2.0
        looks.append(now[0])
        return now[0] > 7.0

    monkeypatch.setattr(stop, "_is_sent", is_sent)
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    address, _ = new_address("run-1", "127.0.0.1", "here")
    address.store_id = store_id
    write_address(tmp_path, address)
    lock = RunLock([tmp_path], print)
    if not lives:
        lock.release()
    ended: list[bool] = []
    group = SimpleNamespace(role="controller", code=None, is_told=False, leave=lambda: ended.append(True))
    try:
        NodeAgent(tmp_path, [group]).on_signal(signal.SIGUSR1)  # type: ignore[list-item]
    finally:
        lock.release()
    waits = lives and bool(store_id)
    assert bool(ended) is not waits and looks == ([2.0, 4.0, 6.0, 8.0] if waits else [2.0])


TRAINER = """import sys, time
from laminar_hpc.line.agent_line import RankReport, report
report(RankReport(joined_as=sys.argv[1]))
time.sleep(100)"""


@pytest.mark.parametrize(
    ("said", "first", "asks"), [("trainer 0", 0, True), ("trainer 8", 8, False), ("", 0, False)]
)
def test_trainers_whose_job_is_to_end_leave_the_run(said, first, asks, tmp_path, monkeypatch):
    """Promise (docs/promises.md#failure-domains): the controller is asked, again and again, to let the
    trainers of all nodes go after their step; those that have not joined yet end at once."""
    asked: list[str] = []

    def ask(run_dir: Path, reason: str) -> None:
        asked.append(reason)
        if len(asked) == 2:
            group.life.signal(signal.SIGKILL)
            while group.code is None and time.monotonic() < until:  # else it is asked until its death is seen
                time.sleep(0.02)

    monkeypatch.setattr(ranks, "_RANK", STAND_IN)
    monkeypatch.setattr(node, "ask_trainers_to_leave", ask)
    monkeypatch.setattr(node, "_ASK_SECONDS", 0.1)
    group = one_rank("trainer", tmp_path, TRAINER, said, per_hour=10, first=first)
    until = time.monotonic() + 60
    while said and not group.life.joined_as and time.monotonic() < until:
        group.look()
        time.sleep(0.02)
    node.leave_run(group, "SIGUSR1")
    if said and not asks:
        group.look()
        assert group.code is None and group.is_told, "another node's agent asks for all"
        group.end()
    NodeAgent(tmp_path, [group]).run()
    assert asked == (["SIGUSR1"] * 2 if asks else [])
    assert group.life.failed == (0, -signal.SIGKILL if asks else -signal.SIGTERM)


LIFE = """import pathlib, sys, time
if pathlib.Path("{before}").exists(): time.sleep(100)
pathlib.Path("{before}").touch(); sys.exit(1)"""


def test_a_signal_between_two_lives_of_a_role_ends_it(tmp_path, monkeypatch, capsys):
    """Promise (docs/promises.md#failure-domains): what is started again when nobody can be told of a stop
    is ended: Slurm's USR1 comes once."""
    lives: list[ranks.Life] = []

    class Life(ranks.Life):
        def __init__(self, *words: object, **more: object) -> None:
            super().__init__(*words, **more)  # type: ignore[arg-type]
            lives.append(self)

    (tmp_path / "metrics.jsonl").write_text('{"kind":"start"}\n')
    monkeypatch.setattr(ranks, "_RANK", (sys.executable, "-c", LIFE.format(before=tmp_path / "before")))
    monkeypatch.setattr(launch, "Life", Life)
    monkeypatch.setattr(launch, "last_step", lambda _: os.kill(os.getpid(), signal.SIGUSR1) or 0)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        assert launch_role.main(["controller", "1", f"run_dir={tmp_path}"]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert len(lives) == 2 and lives[1].failed == (0, -signal.SIGTERM)
    assert "SIGUSR1 before the run was up: ending it" in capsys.readouterr().err
