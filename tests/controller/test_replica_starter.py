"""cluster.scale_command: the user's program is called with what its contract says, one call at a time; what
goes wrong with it is one line, and the next call waits."""

import time
from dataclasses import replace

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.fleet import replica_starter, scale_program
from laminar_hpc.controller.fleet.listed_replicas import ListedReplicas, StillToCome
from laminar_hpc.controller.fleet.replica_starter import AgentStarter, starter_of
from laminar_hpc.controller.fleet.scale_program import STOP_TRIES, CommandStarter, FailedCall, OnTheirWay
from laminar_hpc.line import agent_line
from laminar_hpc.line.agent_line import RankOrders
from laminar_hpc.line.starter_id import own_starter_id

LIMIT = 900.0


def program(folder, text: str, listing: str = "") -> str:
    """`text` is for starts and stops, `listing` for lists."""
    path = folder / "scale it"
    path.write_text(f'#!/bin/sh\n[ "$2" != list ] || {{ {listing or "exit 0"}; exit; }}\n{text}\n')
    path.chmod(0o700)
    return f"'{path}' --mine"


def failures(starter: CommandStarter, count: int, seconds: float = 20.0) -> list[FailedCall]:
    """All that fails, until there are so many or nothing is left to call."""
    return [said for said in sayings(starter, count, seconds) if isinstance(said, FailedCall)]


def sayings(starter: CommandStarter, count: int, seconds: float = 20.0) -> list[FailedCall | OnTheirWay]:
    found, until = list[FailedCall | OnTheirWay](), time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        found += starter.look()
        if not starter._calls and starter._process is None:
            break
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(scale_program, "CALL_SECONDS", 0.05)


def test_the_program_hears_what_is_wanted(tmp_path):
    """Its own words first, RUN_DIR in its environment, one call after the other; what it prints is kept."""
    heard = tmp_path / "heard"
    starter = CommandStarter(program(tmp_path, f'echo "$RUN_DIR $@" >> {heard}; echo done'), tmp_path, LIMIT)
    starter.start(3)
    starter.stop("4711_3")
    assert failures(starter, 1) == []
    assert heard.read_text() == f"{tmp_path} --mine start 3\n{tmp_path} --mine stop 4711_3\n"
    assert (tmp_path / "logs" / "scale.log").read_text() == "done\ndone\n"


def test_a_start_that_fails_is_one_line(tmp_path):
    """With the last thing that it has said; it counts as not asked for, and is not repeated by itself."""
    starter = CommandStarter(program(tmp_path, "echo first; echo no nodes left >&2; exit 3"), tmp_path, LIMIT)
    starter.start(2)
    (failed,) = failures(starter, 1)
    assert failed.text == "cluster.scale_command start 2 has ended with exit code 3: no nodes left"
    assert failed.started == 2 and "\n" not in failed.text
    before = time.monotonic()
    starter.start(1)
    failures(starter, 1)
    assert time.monotonic() - before >= 0.1  # twice as long as before the first failure


def test_a_stop_is_tried_again_and_then_given_up(tmp_path):
    starter = CommandStarter(program(tmp_path, "exit 1"), tmp_path, LIMIT)
    starter.stop("a")
    found = failures(starter, STOP_TRIES)
    assert [each.final for each in found] == [False] * (STOP_TRIES - 1) + [True]
    assert failures(starter, 1, 0.3) == []


def test_a_program_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(scale_program, "LIMIT_SECONDS", 0.3)
    starter = CommandStarter(program(tmp_path, "sleep 60"), tmp_path, LIMIT)
    starter.start(1)
    (failed,) = failures(starter, 1)
    assert "has not returned within 0 s; it has said nothing" in failed.text


def test_a_program_that_is_gone_is_one_line(tmp_path):
    starter = CommandStarter(str(tmp_path / "none"), tmp_path, LIMIT)
    starter.start(1)
    (failed,) = failures(starter, 1)
    assert (
        failed.text == "cluster.scale_command list cannot be run: No such file or directory"
        and failed.started == 1
    )


def test_nobody_is_asked_for_twice(tmp_path):
    """Those that the program lists and that are not in the run come off what is asked for, however often.
    One that has joined, or is being stopped, does not; one that is late is stopped."""
    heard, listing = tmp_path / "heard", tmp_path / "listing"
    listing.write_text("7_1 waiting\n7_2 waiting\n7_3\n6_1\n6_2\n")
    command = program(tmp_path, f'echo "$2 $3" >> {heard}', f"cat {listing}")
    starter = CommandStarter(command, tmp_path, LIMIT)
    starter.here = lambda: {"6_1"}
    starter.start(4)
    starter.stop("6_2")
    (said,) = sayings(starter, 2)
    assert said == OnTheirWay("3 are on their way, 2 of them waiting for a machine: 1 started")
    listing.write_text("7_1 waiting\n7_2 waiting\n7_3\n6_1\n")
    for _ in range(3):
        starter.start(2)
        (said,) = sayings(starter, 2)
        assert said.text.endswith(": none started")
    assert heard.read_text() == "start 1\nstop 6_2\n"
    starter._listed = ListedReplicas(-1.0)
    starter.start(3)
    (said,) = sayings(starter, 2)
    assert said == OnTheirWay("2 are on their way, 2 of them waiting for a machine: 1 started")
    assert heard.read_text().splitlines()[2:] == ["start 1", "stop 7_3"]


def test_only_one_that_has_a_machine_can_be_late():
    """From the first list that shows it with a machine and not in the run; one that has joined since, or
    waits again, begins anew."""
    listed = ListedReplicas(100.0)
    assert listed.judge("a\nb waiting\n", (), 0.0) == StillToCome(["a", "b"], ["b"], [])
    assert listed.judge("a\nb\n", (), 100.0) == StillToCome(["a", "b"], [], [])
    assert listed.judge("a\nb\n", (), 101.0) == StillToCome(["b"], [], ["a"])
    assert listed.judge("a\nb waiting\n", {"a"}, 300.0) == StillToCome(["b"], ["b"], [])
    assert listed.judge("a\nb\n", (), 400.0) == StillToCome(["a", "b"], [], [])


def test_whoever_is_on_their_way_at_the_end_is_stopped(tmp_path):
    """What was not begun is not started any more; who has joined ends with the run. Not where the run goes
    on in another life of its job."""
    heard = tmp_path / "heard"
    command = program(tmp_path, f'echo "$2 $3" >> {heard}', "echo 6_1; echo 7_1 waiting; echo 7_2")
    goes_on = CommandStarter(command, tmp_path, LIMIT)
    goes_on.start(1)
    goes_on.close(is_final=False)
    assert not heard.exists()
    starter = CommandStarter(command, tmp_path, LIMIT)
    starter.here = lambda: {"6_1"}
    starter.start(4)
    starter.look()  # the list of that start is under way
    starter.stop("5_9")
    starter.close(is_final=True)
    assert heard.read_text() == "stop 5_9\nstop 7_1\nstop 7_2\n"


def test_a_list_that_cannot_be_read_or_fails_starts_nobody(tmp_path):
    """It counts as not asked for, and what it has said is the line."""
    heard = tmp_path / "heard"
    for listing, why in (
        ("echo 7_1 RUNNING", "has printed '7_1 RUNNING': print an ID a line, or an ID and `waiting`"),
        ("echo --all", "has printed '--all': print an ID a line, or an ID and `waiting`"),
        ("echo cannot reach Slurm >&2; exit 1", "has ended with exit code 1: cannot reach Slurm"),
    ):
        starter = CommandStarter(program(tmp_path, f"touch {heard}", listing), tmp_path, LIMIT)
        starter.start(2)
        assert failures(starter, 1) == [FailedCall(f"cluster.scale_command list {why}", 2)]
    assert not heard.exists()


def test_a_program_hears_nothing_of_the_controllers_own_job(tmp_path, monkeypatch):
    """What Slurm and an agent have told the controller is not for the jobs that the program submits."""
    for name in ("SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK", "SLURM_CONF", agent_line.VARIABLE):
        monkeypatch.setenv(name, "1")
    told = tmp_path / "told"
    starter = CommandStarter(program(tmp_path, f"env > {told}"), tmp_path, LIMIT)
    starter.start(1)
    assert failures(starter, 1) == []
    names = {line.partition("=")[0] for line in told.read_text().splitlines()}
    assert {name for name in names if name.startswith("SLURM_")} == {"SLURM_CONF"}
    assert agent_line.VARIABLE not in names and "RUN_DIR" in names


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
    for name in (
        "LAMINAR_REPLICA_ID",
        "SLURM_HET_SIZE",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_JOB_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    assert own_starter_id() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert own_starter_id() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert own_starter_id() == "11_3"
    monkeypatch.setenv("SLURM_HET_SIZE", "3")
    assert own_starter_id() == ""
    monkeypatch.setenv("LAMINAR_REPLICA_ID", "i-0abc")
    assert own_starter_id() == "i-0abc"
    for wrong in ("--all", "a b", "x;y", "a\n"):
        monkeypatch.setenv("LAMINAR_REPLICA_ID", wrong)
        with pytest.raises(LaminarError, match="LAMINAR_REPLICA_ID="):
            own_starter_id()
