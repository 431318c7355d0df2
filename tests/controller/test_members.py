"""Who may join: a second start of a role must not push out a live process of the run."""

import os
import subprocess
import sys
import time

import pytest

from laminar_hpc.controller import members as module
from laminar_hpc.controller.members import Members
from laminar_hpc.messages.membership import Hello


def hello(pid: int, machine: str = "here", life: str = "") -> Hello:
    return Hello("trainer", 0, life, pid, machine)


@pytest.fixture
def members() -> Members:
    return Members("here", 10.0)


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


def test_elsewhere_only_a_fresh_ping_tells(members, monkeypatch):
    """Promise: a worker on another machine that is not heard may be replaced before it is declared dead."""
    members.join("trainer:0:a", hello(7, "there"))
    assert members.rival(hello(8, "there", "b")) is not None
    members.at("trainer").last_seen = time.monotonic() - module._SURELY_ALIVE_SECONDS
    assert members.rival(hello(8, "there", "b")) is None
