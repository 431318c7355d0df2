"""What a launcher makes of a signal."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from laminar_hpc.cluster import launch_role, stop
from laminar_hpc.cluster.address import new_address, write_address
from laminar_hpc.cluster.launch import Launch
from laminar_hpc.cluster.run_lock import RunLock
from laminar_hpc.config.schema import RunConfig


class Untold(Launch):
    """Of a job that `ended` says was ended at once."""

    def __init__(self, run_dir: Path) -> None:
        self._config, self._stops, self._asked, self.ended = RunConfig(run_dir=str(run_dir)), 0, 0.0, False

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize(("lives", "store_id"), [(True, "s"), (True, ""), (False, "s")])
def test_a_controller_in_a_long_turn_is_asked_to_stop(tmp_path, monkeypatch, lives, store_id):
    """Promise (docs/architecture.md#failure-domains): a signal is an order to finish the step and to write a
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
    try:
        launch = Untold(tmp_path)
        launch.on_signal(signal.SIGUSR1)
    finally:
        lock.release()
    waits = lives and bool(store_id)
    assert launch.ended is not waits and looks == ([2.0, 4.0, 6.0, 8.0] if waits else [2.0])


TRAINER = """import sys, time
print(sys.argv[1], file=sys.stderr, flush=True)
time.sleep(100)"""


@pytest.mark.parametrize(
    ("said", "first", "asks"),
    [("laminar: joined as trainer 0", 0, True), ("laminar: joined as trainer 8", 8, False), ("", 0, False)],
)
def test_trainers_whose_job_is_to_end_leave_the_run(said, first, asks, tmp_path, monkeypatch):
    """Promise (docs/architecture.md#failure-domains): the controller is asked, again and again, to let the
    trainers of all nodes go after their step; those that have not joined yet end at once."""
    asked: list[str] = []

    class Life(launch_role.RoleLaunch):
        def _runner(self) -> list[str]:
            return ["trainer_life", said]

        def _environment(self) -> dict[str, str]:
            return {"PYTHONPATH": str(tmp_path)}

    def ask(run_dir: Path, reason: str) -> None:
        asked.append(reason)
        if len(asked) == 2:
            life._kill(signal.SIGKILL)

    (tmp_path / "trainer_life.py").write_text(TRAINER)
    monkeypatch.setenv(launch_role.LEAVES_ALONE, "1")
    monkeypatch.setattr(launch_role, "ask_trainers_to_leave", ask)
    monkeypatch.setattr(launch_role, "_ASK_SECONDS", 0.1)
    life = Life(RunConfig(run_dir=str(tmp_path), role="trainer", first_index=first), [], 1)
    until = time.monotonic() + 30
    while said and not life.joined_as and time.monotonic() < until:
        time.sleep(0.02)
    life.on_signal(signal.SIGUSR1)
    if said and not asks:
        assert life._process.poll() is None and life.is_final, "another node's launcher asks for all"
        life.end()
    life.wait()
    assert asked == (["SIGUSR1"] * 2 if asks else [])
    assert life._process.returncode == (-signal.SIGKILL if asks else -signal.SIGTERM)


LIFE = "import sys, time; sys.exit(1) if sys.argv[1] == '1' else time.sleep(100)"


def test_a_signal_between_two_lives_of_a_role_ends_it(tmp_path, monkeypatch, capsys):
    """Promise (docs/architecture.md#failure-domains): what is started again when nobody can be told of a stop
    is ended: Slurm's USR1 comes once."""
    lives: list[launch_role.RoleLaunch] = []

    class Life(launch_role.RoleLaunch):
        """The first one fails; the second one goes on until it is ended."""

        def _runner(self) -> list[str]:
            lives.append(self)
            assert len(lives) <= 2, "it goes on although it was told to end"
            return ["life", str(len(lives))]

        def _environment(self) -> dict[str, str]:
            return {"PYTHONPATH": str(tmp_path)}

    (tmp_path / "life.py").write_text(LIFE)
    (tmp_path / "metrics.jsonl").write_text('{"kind":"start"}\n')
    monkeypatch.setattr(launch_role, "RoleLaunch", Life)
    monkeypatch.setattr(launch_role, "_last_step", lambda _: os.kill(os.getpid(), signal.SIGUSR1) or 0)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        assert launch_role.main(["controller", "1", f"run_dir={tmp_path}"]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert lives[1]._process.returncode == -signal.SIGTERM
    assert "SIGUSR1 before the run was up: ending it" in capsys.readouterr().err
