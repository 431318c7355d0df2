"""cluster.scale_command: the user's program is called with what its contract says, one call at a time; what
goes wrong with it is one line, and the next call waits."""

import time
from dataclasses import replace

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.fleet import replica_starter
from laminar_hpc.controller.fleet.replica_starter import (
    STOP_TRIES,
    AgentStarter,
    CommandStarter,
    FailedCall,
    starter_of,
)
from laminar_hpc.line import agent_line
from laminar_hpc.line.agent_line import RankOrders
from laminar_hpc.line.starter_id import own_starter_id


def program(folder, text: str) -> str:
    path = folder / "scale it"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return f"'{path}' --mine"


def failures(starter: CommandStarter, count: int, seconds: float = 20.0) -> list[FailedCall]:
    """All that fails, until there are so many or nothing is left to call."""
    found, until = list[FailedCall](), time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        found += starter.look()
        if not starter._calls and starter._process is None:
            break
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(replica_starter, "CALL_SECONDS", 0.05)


def test_the_program_hears_what_is_wanted(tmp_path):
    """Its own words first, RUN_DIR in its environment, one call after the other; what it prints is kept."""
    heard = tmp_path / "heard"
    starter = CommandStarter(program(tmp_path, f'echo "$RUN_DIR $@" >> {heard}; echo done'), tmp_path)
    starter.start(3)
    starter.stop("4711_3")
    assert failures(starter, 1) == []
    assert heard.read_text() == f"{tmp_path} --mine start 3\n{tmp_path} --mine stop 4711_3\n"
    assert (tmp_path / "logs" / "scale.log").read_text() == "done\ndone\n"


def test_a_start_that_fails_is_one_line(tmp_path):
    """With the last thing that it has said; it counts as not asked for, and is not repeated by itself."""
    starter = CommandStarter(program(tmp_path, "echo first; echo no nodes left >&2; exit 3"), tmp_path)
    starter.start(2)
    (failed,) = failures(starter, 1)
    assert failed.text.endswith("--mine start 2 has ended with exit code 3: no nodes left")
    assert failed.started == 2 and "\n" not in failed.text
    before = time.monotonic()
    starter.start(1)
    failures(starter, 1)
    assert time.monotonic() - before >= 0.1  # twice as long as before the first failure


def test_a_stop_is_tried_again_and_then_given_up(tmp_path):
    starter = CommandStarter(program(tmp_path, "exit 1"), tmp_path)
    starter.stop("a")
    found = failures(starter, STOP_TRIES)
    assert [each.final for each in found] == [False] * (STOP_TRIES - 1) + [True]
    assert failures(starter, 1, 0.3) == []


def test_a_program_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_starter, "LIMIT_SECONDS", 0.3)
    starter = CommandStarter(program(tmp_path, "sleep 60"), tmp_path)
    starter.start(1)
    (failed,) = failures(starter, 1)
    assert "has not returned within 0 s; it has said nothing" in failed.text


def test_a_program_that_is_gone_is_one_line(tmp_path):
    starter = CommandStarter(str(tmp_path / "none"), tmp_path)
    starter.start(1)
    (failed,) = failures(starter, 1)
    assert failed.text.endswith("start 1 cannot be run: No such file or directory") and failed.started == 1


def test_who_starts_replicas(monkeypatch):
    """The program, else the agent that says so; without either, and in one world, a line that says what to
    write."""
    config = RunConfig(role="controller")
    config.rollout.replicas = "2:4"
    with pytest.raises(LaminarError, match=r"rollout.replicas=2:4: nobody starts replicas here; name a prog"):
        starter_of(config)
    monkeypatch.setattr(replica_starter, "orders", lambda: RankOrders(starts_replicas=True))
    assert isinstance(starter_of(config), AgentStarter)
    with pytest.raises(LaminarError, match="ranks of one world begin and end together"):
        starter_of(replace(config, role="all"))
    config.cluster.scale_command = "/bin/true"
    assert isinstance(starter_of(config), CommandStarter)


def test_an_agent_hears_how_many_are_wanted(tmp_path, monkeypatch):
    with open(tmp_path / "reports", "w+b") as file:
        orders = RankOrders(report_to=file.fileno())
        monkeypatch.setattr(agent_line, "orders", lambda: orders)
        AgentStarter().start(3)
        said, _ = agent_line.reported(file.fileno(), 0)
    assert [each.start for each in said] == [3]


def test_what_a_replica_is_called(monkeypatch):
    """Its own word, else the Slurm job as scancel takes it; no word that a program takes for an option."""
    for name in ("LAMINAR_REPLICA_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert own_starter_id() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert own_starter_id() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert own_starter_id() == "11_3"
    monkeypatch.setenv("LAMINAR_REPLICA_ID", "i-0abc")
    assert own_starter_id() == "i-0abc"
    for wrong in ("--all", "a b", "x;y", "a\n"):
        monkeypatch.setenv("LAMINAR_REPLICA_ID", wrong)
        with pytest.raises(LaminarError, match="LAMINAR_REPLICA_ID="):
            own_starter_id()
