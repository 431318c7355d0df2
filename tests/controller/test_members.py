"""Who may join: a second start of a role must not push out a live process of the run."""

import os
import subprocess
import sys
import time

import pytest

from laminar_hpc.controller.fleet import members as module
from laminar_hpc.controller.fleet.members import Members
from laminar_hpc.line.messages.membership import Hello


def hello(pid: int, machine: str = "here", life: str = "") -> Hello:
    return Hello("trainer", 0, life, pid, machine)


@pytest.fixture
def members() -> Members:
    return Members("here", 10.0, 5.0)


def test_a_live_process_keeps_its_place(members):
    """Promise: on this machine its PID tells; a process that has ended, or joins again itself, is replaced at
    once."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    members.join("trainer:0:a", hello(process.pid))
    assert members.rival(hello(os.getpid(), life="b")) is members.at("trainer")
    assert members.rival(hello(process.pid, life="b")) is None, "the same process, once more"
    assert members.rival(Hello("trainer", 1, "b", os.getpid(), "here")) is None, "another place"
    process.kill()
    process.wait()
    assert members.rival(hello(os.getpid(), life="b")) is None


def test_a_relay_of_another_place_takes_nobodys_number(members):
    """It is no restart of the one that has it, however long that one has been silent."""
    members.join("relay:0:a", Hello("relay", 0, "a", 7, "there"))
    members.at("relay").last_seen -= 5.0
    assert members.rival(Hello("relay", 0, "b", 8, "there")) is None
    assert members.rival(Hello("relay", 0, "b", 8, "far", place="paris")) is members.at("relay")


def test_silence_counts_only_while_all_were_heard(members):
    """docs/promises.md#turns: nobody is dead whose pings may wait to be read; who is stays so until it is
    taken out; those that are dead come in the order of joining."""
    for index in (1, 0):
        members.join(f"trainer:{index}:a", Hello("trainer", index, "a", 7, "there"))
    second, first = members.at("trainer", 1), members.at("trainer", 0)
    members.listened_until(second.last_seen + 9.9)
    assert members.dead() == []
    members.listened_until(first.last_seen + 10.1)
    assert members.dead() == members.dead() == [second, first]
    first.last_seen += 1.0
    members.leave(second)
    assert members.dead() == []
    members.listened_until(first.last_seen + 10.1)
    assert members.dead() == [first]


def test_a_silent_rollout_s_work_goes_on_elsewhere_soon(members):
    """docs/delivery.md, Outages: a rollout that can come back is given up earlier than others, after as
    many pings as a busy machine may delay, and in one world none is."""
    members.join("trainer:0:a", Hello("trainer", 0, "a", 7, "there"))
    members.join("rollout:0:a", Hello("rollout", 0, "a", 8, "there"))
    rollout = members.at("rollout")
    members.listened_until(rollout.last_seen + 4.9)
    assert members.dead() == []
    members.listened_until(rollout.last_seen + 5.1)
    assert members.dead() == [rollout]
    assert [module.rollout_silence(seconds) for seconds in (3, 9, 30)] == [3, 5, 10]


def test_a_death_on_this_machine_is_found_by_the_process(members):
    """Of all members that it was, and again until they are taken out; who is asked for by role or machine is
    no longer there."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for index in (0, 1):
        members.join(f"rollout:{index}:a", Hello("rollout", index, "a", process.pid, "here"))
    members.join("rollout:2:a", Hello("rollout", 2, "a", process.pid, "there"))
    assert members.dead() == []
    process.kill()
    process.wait()
    dead = members.dead(look=True)
    assert [member.hello.index for member in dead] == [0, 1] and members.dead() == dead
    for member in dead:
        members.leave(member)
    assert members.dead() == [] and members.count("rollout") == 1
    assert members.all("rollout") == members.on("there", "rollout") and members.on("here", "rollout") == []


def test_elsewhere_only_a_fresh_ping_tells(members, monkeypatch):
    """Promise: a worker on another machine that is not heard may be replaced before it is declared dead."""
    members.join("trainer:0:a", hello(7, "there"))
    assert members.rival(hello(8, "there", "b")) is not None
    members.at("trainer").last_seen = time.monotonic() - module._SURELY_ALIVE_SECONDS
    assert members.rival(hello(8, "there", "b")) is None
