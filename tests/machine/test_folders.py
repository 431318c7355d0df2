"""Folders of the dead are removed, and no others; machines are told apart."""

import os
import signal
import socket
import subprocess
import sys

from laminar_hpc.machine import processes
from laminar_hpc.machine.files.folders import OWNER_FILE, claim, remove_abandoned

CLAIM_AND_DIE = """
import os, pathlib, signal, sys
from laminar_hpc.machine.files.folders import claim
claim(pathlib.Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_folders_of_dead_processes_of_this_machine_are_removed(tmp_path):
    """Left alone: living owners, other containers or boots, no owner, links. An id in use again does not make
    its first owner alive."""
    folders = {
        name: tmp_path / f"x-{name}" for name in ("dead", "mine", "reused", "elsewhere", "nobody's", "broken")
    }
    for folder in (*folders.values(), tmp_path / "y-dead"):
        folder.mkdir()
    for folder in (folders["dead"], tmp_path / "y-dead"):
        process = subprocess.run([sys.executable, "-c", CLAIM_AND_DIE, str(folder)], timeout=60, check=False)
        assert process.returncode == -signal.SIGKILL
    claim(folders["mine"])
    pid, started, world = (folders["mine"] / OWNER_FILE).read_text().split(maxsplit=2)
    (folders["reused"] / OWNER_FILE).write_text(
        f"{pid} {int(started) - 1} {world}"
    )  # an earlier process of our id: dead
    (folders["elsewhere"] / OWNER_FILE).write_text(f"{2**22 + 1} 1 another-boot pid:[1]")
    (folders["broken"] / OWNER_FILE).write_text("?")
    os.symlink(folders["dead"], tmp_path / "x-link")
    assert set(remove_abandoned(tmp_path, "x-")) == {folders["dead"], folders["reused"]}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"x-mine", "x-elsewhere", "x-nobody's", "x-broken", "x-link", "y-dead"}


def test_machines_of_one_name_are_told_apart(tmp_path, monkeypatch):
    """Two that are called the same and mount the same kind of folder are two: the pid of a process on one is
    not looked up on the other. On one machine all processes say the same."""
    here = processes.machine_name(str(tmp_path))
    assert here == processes.machine_name(str(tmp_path)) and here.startswith(socket.gethostname() + "/")
    monkeypatch.setattr(processes, "boot", lambda: "0123456789abcdef")
    assert processes.machine_name(str(tmp_path)) != here
