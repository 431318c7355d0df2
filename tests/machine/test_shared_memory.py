"""Shared memory of killed sessions is removed, and nobody else's: real processes, real segments in
/dev/shm."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar_hpc.engine import leftovers
from laminar_hpc.launch import cli
from laminar_hpc.launch.doctor import command, machine
from laminar_hpc.launch.doctor.findings import CheckTable
from laminar_hpc.machine.files import folders
from laminar_hpc.machine.files.shared_memory import SHM, Note, noted, present

# Makes a segment and waits, as one of SGLang's processes does; no resource tracker survives a session that is
# killed.
HOLDER = """
import sys
from multiprocessing import resource_tracker, shared_memory
held = shared_memory.SharedMemory(name=sys.argv[1], create=True, size=1 << 20)
held.buf[:] = b"x" * (1 << 20)
resource_tracker.unregister(held._name, "shared_memory")
print("ready", flush=True)
sys.stdin.read()
"""
CLAIM_AND_DIE = """
import os, pathlib, signal, sys
from laminar_hpc.machine.files.folders import claim
claim(pathlib.Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


class Holder:
    """A session of its own with one segment of 1 MiB."""

    def __init__(self, name: str) -> None:
        self.path = SHM / name
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.communicate()


@pytest.fixture
def prefix() -> Iterator[str]:
    """Of names that only this test uses."""
    name = f"sgl_test_{os.getpid()}_"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.unlink()


def abandon(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", CLAIM_AND_DIE, str(folder)], check=False)


def test_a_killed_sessions_segments_go_and_all_others_stay(prefix: str, tmp_path: Path) -> None:
    """Left alone: what was there before, another program's, what took a noted name later, and what a living
    process still has."""
    folder = tmp_path / f"{folders.ENGINE_FOLDER_PREFIX}x"
    folder.mkdir()
    (SHM / f"{prefix}before").touch()
    note = Note(folder)
    ours, reused, other = (Holder(f"{prefix}{name}") for name in ("ours", "reused", "other"))
    for holder in (ours, reused):
        note.update(holder.process.pid)
    assert sorted(noted(folder)) == [ours.path, reused.path]
    abandon(folder)
    assert leftovers.clean(temporary=tmp_path) == [] and ours.path.exists(), "its processes live"
    for holder in (ours, reused):
        holder.kill()
    reused.path.unlink()
    reused.path.write_bytes(b"somebody else's")
    found = leftovers.find(temporary=tmp_path)
    assert [(each.what, each.path) for each in found if each.path.parent == tmp_path] == [
        ("engine files", folder)
    ]
    assert 2**20 <= found[0].size < 2**21, "the segment counts"
    assert [each.path for each in leftovers.clean(temporary=tmp_path) if each.path.parent == tmp_path] == [
        folder
    ]
    assert not ours.path.exists() and not folder.exists()
    assert reused.path.exists() and other.path.exists() and (SHM / f"{prefix}before").exists()
    other.kill()


def test_nothing_is_noted_of_a_session_that_makes_nothing(prefix: str, tmp_path: Path) -> None:
    """Another program's segment, new as it is, is no session's that does not have it."""
    note = Note(tmp_path)
    other = Holder(f"{prefix}other")
    note.update(os.getpid())
    assert other.path.name in {segment.name for segment in present() - note.before} and noted(tmp_path) == []
    other.kill()


def test_doctor_lists_and_frees_what_is_left(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """One warn line with sizes and the cure; --clean removes it and names each thing."""
    monkeypatch.setattr(leftovers.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"{folders.ENGINE_FOLDER_PREFIX}y"
    folder.mkdir()
    note, holder = Note(folder), Holder(f"{prefix}mq")
    note.update(holder.process.pid)
    abandon(folder)
    holder.kill()
    monkeypatch.setattr(command, "CHECKS", CheckTable(machine.CHECKS[:1]))
    assert cli.run(["doctor"]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("warn  left behind: ")
        and "engine files of 1 (1 MiB)" in said
        and "laminar doctor --clean" in said
    )
    assert holder.path.exists()
    assert cli.run(["doctor", "--clean"]) == 0
    said = capsys.readouterr().out
    assert f"removed: engine files {folder}, 1 MiB" in said and "ok    left behind: nothing" in said
    assert not holder.path.exists() and not folder.exists()
