"""When a job that is told of its end stops, and whether it is requeued."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.stand_ins import JOINED, STAND_IN, one_rank
from laminar_hpc.launch import launch, ranks
from laminar_hpc.launch.slurm.ending import (
    JobEnding,
    controller_since,
    has_more_to_do,
    lead_seconds,
    seconds_to_go_on,
)
from laminar_hpc.launch.slurm.machine_number import MachineNumber
from laminar_hpc.launch.slurm.node import Node, NodePlace
from laminar_hpc.line.address import ADDRESS_FILE
from laminar_hpc.store.run_end import goes_on


def write(run_dir: Path, *records: dict) -> Path:
    run_dir.mkdir(exist_ok=True)
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    (run_dir / "metrics.jsonl").write_text(text)
    return run_dir


def test_it_trains_on_as_long_as_a_stop_leaves_time_for(tmp_path: Path) -> None:
    """Promise: what a stop needs follows from earlier steps and checkpoints, without the first step of each
    life; a signal that comes long before the limit is not for the limit."""
    steps = [{"kind": "step", "seconds": seconds} for seconds in (500, 20, 40)]
    run_dir = write(tmp_path / "run", {"kind": "start"}, *steps, {"kind": "checkpoint", "seconds": 60})
    needed = 1.5 * (40 + 60) + 60
    assert seconds_to_go_on("trainer", run_dir, 600.0) == 600 - needed
    assert seconds_to_go_on("controller", run_dir, 100.0) == 0.0
    assert seconds_to_go_on("rollouts", run_dir, 100.0) == 55.0
    assert seconds_to_go_on("trainer", run_dir, None) == seconds_to_go_on("trainer", run_dir, 9000.0) == 0.0
    assert lead_seconds(run_dir) == 600.0
    write(run_dir, {"kind": "start"}, {"kind": "checkpoint", "seconds": 1000})
    assert lead_seconds(run_dir) == 2 * (1500 + 60)


@pytest.mark.parametrize(
    ("role", "word", "told", "lives", "again"),
    [
        ("trainer", "done", True, False, False),  # it was complete when its time was over
        ("trainer", "SIGUSR1", True, False, True),
        ("controller", "SIGTERM", False, False, True),  # the trainers' time was over
        ("rollouts", "SIGUSR1", False, False, True),
        ("rollouts", "", True, True, True),  # it leaves a run that goes on
        ("trainer", "", True, True, True),
        ("rollouts", "laminar stop", False, False, False),
        ("trainer", "laminar stop", False, False, False),
        ("trainer", "laminar stop", True, False, False),  # while it went on until its time was over
        ("trainer", "failed: no room", True, False, False),
        ("rollouts", "done", False, False, False),
        ("controller", "SIGTERM: trainer 0 has died, before the run could stop", False, False, True),
        ("trainer", "laminar stop: trainer 0 has died, before the run could stop", True, False, False),
    ],
)
def test_who_is_requeued(tmp_path: Path, role: str, word: str, told: bool, lives: bool, again: bool) -> None:
    """Promise: a run that has more to do goes on by itself in all its jobs; one that is complete, that failed
    or that the user has stopped stays ended."""
    end = [{"kind": "end", "reason": word}] if word else []
    run_dir = write(tmp_path / "run", {"kind": "start"}, *end)
    if lives:
        (run_dir / "controller.json").write_text("{}")
    ended = JobEnding(True, told, alone=NodePlace(role, 0, 1, run_dir, "1.0", None).leaves_alone)
    assert has_more_to_do(role, run_dir, ended) is again


def test_a_node_that_has_not_begun_yet_leaves_term_to_the_script(tmp_path: Path) -> None:
    """Promise (docs/promises.md#failure-domains): a job that is preempted while a node of it waits for
    its number, or its network, does not die of the signal: the script tells it to end, and it is requeued."""
    (tmp_path / "jobs").mkdir()
    code = """
import os, signal
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch.slurm import node

def told(seconds):
    os.kill(os.getpid(), signal.SIGTERM)
    raise LaminarError("it is heard")

node.await_own_address = told
raise SystemExit(node.main(["rollouts"]))
"""
    given = {**os.environ, "RUN_DIR": str(tmp_path), "LAMINAR_LIFE": "7.0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "laminar: error: it is heard\n", done
    assert (tmp_path / "jobs" / "term.7.0").exists()


def test_the_controller_s_last_record_is_awaited(tmp_path: Path) -> None:
    """Promise: who ends before the controller waits until it has said why the run ended."""
    run_dir = write(tmp_path / "run", {"kind": "start"})
    (run_dir / "controller.json").write_text("{}")
    stamp = controller_since(run_dir)
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            write(run_dir, {"kind": "start"}, {"kind": "end", "reason": "SIGTERM"})
            (run_dir / "controller.json").unlink()

    assert has_more_to_do("trainer", run_dir, JobEnding(True, False, stamp), sleep) and len(waits) == 5


@pytest.mark.parametrize(
    ("word", "code", "again"), [("SIGTERM", 0, True), ("laminar stop", 0, False), ("SIGTERM", 1, False)]
)
def test_a_run_that_stops_while_a_process_starts_has_the_job_back(
    word: str, code: int, again: bool, tmp_path: Path, handlers: None
) -> None:
    """Promise (docs/promises.md#failure-domains): relays that were not there when the run stopped
    join its next controller; their rollouts have left, so the job ends at once and is requeued, but not one
    that failed, nor after a stop by the user."""
    run_dir = write(tmp_path / "run", {"kind": "start"}, {"kind": "end", "reason": word})
    (run_dir / "jobs").mkdir()
    place = NodePlace("rollouts", 0, 1, run_dir, "5.0", None)
    programs = {"relay": CHILD, "rollout": f"raise SystemExit({code})"}
    node = Node(place, [one_rank(role, run_dir, text, per_hour=9) for role, text in programs.items()])

    def next_controller() -> None:
        write(run_dir, {"kind": "start"}, {"kind": "end", "reason": word}, {"kind": "start"})
        (run_dir / "controller.json").write_text("{}")

    timer = threading.Timer(2.0, next_controller)
    timer.start()
    assert node.run() == code
    timer.join()
    assert has_more_to_do("rollouts", run_dir, node.ended, sleep=lambda _: None) is again


def test_machines_have_the_lowest_free_number(tmp_path: Path) -> None:
    """Promise: nodes come and go, two at a time never have the same number, and one that left is given
    again."""
    first, second = MachineNumber(tmp_path, 2), MachineNumber(tmp_path, 2)
    assert (first.number, second.number) == (0, 1)
    first.release()
    third = MachineNumber(tmp_path, 2)
    assert third.number == 0
    second.release()
    third.release()


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True: time.sleep(0.05)
"""


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "_RANK", STAND_IN)
    monkeypatch.setattr(launch, "_ALONE_SECONDS", 4.0)
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_node_leaves_when_the_job_is_told(tmp_path: Path, handlers: None) -> None:
    """Promise: TERM is the script's to judge; the file that it then writes becomes one signal to the node's
    ranks; one that ended before it could hear of it has not failed."""
    (tmp_path / "jobs").mkdir()
    place = NodePlace("rollouts", 0, 1, tmp_path, "5.0", None)
    node = Node(place, [one_rank(role, tmp_path, CHILD) for role in ("relay", "rollout")])
    os.kill(os.getpid(), signal.SIGTERM)
    assert place.file("term").exists()
    place.file("end").write_text("now\n")
    assert node.run() == 0 and node.ended == JobEnding(in_order=True, told=True, alone=True)


def test_a_preemption_while_it_goes_on_ends_it_at_once(tmp_path: Path, handlers: None) -> None:
    """Promise: before its time limit a job goes on while it can; TERM after that is heard too."""
    (tmp_path / "jobs").mkdir()
    place = NodePlace("trainer", 0, 1, tmp_path, "5.0", time.time() + 500)
    node = Node(place, [one_rank("trainer", tmp_path, CHILD)])
    place.file("end").write_text("limit\n")
    threading.Timer(2.0, lambda: place.file("end").write_text("now\n")).start()
    started = time.monotonic()
    node.run()
    assert 2.0 <= time.monotonic() - started < 60 and node.ended and node.ended.told


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("limit", "SIGUSR1"),
        ("now", "SIGTERM"),  # of a preemption
        ("failed: trainer ended with exit code 2", "failed: trainer ended with exit code 2"),
    ],
)
def test_the_reason_of_a_stop_is_what_happened(
    told: str, reason: str, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise (docs/promises.md#failure-domains): the run's last record tells a preemption from the end
    of the time."""
    (tmp_path / "jobs").mkdir()
    place, said = NodePlace("controller", 0, 1, tmp_path, "5.0", None), list[str]()
    monkeypatch.setattr("laminar_hpc.launch.slurm.node.spare_of", lambda _: "")
    group = one_rank("controller", tmp_path, f"{JOINED}{CHILD}")

    def ask(run_dir: Path, reason: str, seconds: float) -> bool:
        said.append(reason)
        group.life.signal(signal.SIGKILL)
        return True

    monkeypatch.setattr(launch, "request_stop", ask)
    node = Node(place, [group])
    while not group.life.joined_as:
        group.look()
        time.sleep(0.02)
    place.file("end").write_text(f"{told}\n")
    assert node.run() == 1 and said == [reason]


@pytest.mark.parametrize(("goes_on", "code"), [(True, 1), (False, 1), (True, 2)])
def test_a_relay_that_dies_is_started_again_while_the_run_goes_on(
    goes_on: bool, code: int, tmp_path: Path, handlers: None
) -> None:
    """Promise: nobody sits in front of a Slurm job; a refusal, and an end of the run, are not tried again."""
    if goes_on:
        write(tmp_path / "run", {"kind": "start"})
    group = one_rank("relay", tmp_path / "run", f"raise SystemExit({code})", per_hour=3)
    assert launch.NodeAgent(tmp_path / "run", [group]).run() == code
    assert len(group.restarts.times) == (3 if goes_on and code == 1 else 0)


def test_a_run_goes_on_while_its_controller_starts_again(tmp_path: Path) -> None:
    """Promise: a rollout or trainer that dies meanwhile, as on a full disk, which keeps the controller from
    showing its address, is started again; one that dies before a run has begun or after its end is not."""
    run_dir = write(tmp_path / "run", {"kind": "start"}, {"kind": "end", "reason": "failed: x"})
    assert not goes_on(run_dir) and not goes_on(tmp_path / "none")
    (run_dir / ADDRESS_FILE).touch()
    assert goes_on(run_dir)
    (run_dir / ADDRESS_FILE).unlink()
    write(run_dir, {"kind": "end", "reason": "failed: x"}, {"kind": "start"}, {"kind": "step", "step": 1})
    assert goes_on(run_dir)
    write(run_dir, {"kind": "start"}, {"kind": "end", "reason": "done"})
    assert not goes_on(run_dir)


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").iterdir()), ids=lambda p: p.name)
def test_shell_can_read_the_scripts(script: Path) -> None:
    """Promise: each script of slurm/ is whole, and every srun says how many nodes and tasks it has."""
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    for line in script.read_text().splitlines():
        if line.lstrip().startswith("srun "):
            assert "-N " in line and "-n " in line
