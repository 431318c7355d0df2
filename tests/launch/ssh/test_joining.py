"""A machine of `laminar launch` that sees no folder of the run: what it is told on its standard input, and
the key that it waits for."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch.ssh.joining import RunKey, join_line
from laminar_hpc.line.join_key import JOIN_FILE, new_join_key, write_join_key

JOIN = [sys.executable, "-m", "laminar_hpc.launch.cli", "join", "--key", "-"]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ("leave\n", 0, "left         before it had joined the run"),
        ("over\n", 0, "left         before it had joined the run"),
        ("", 0, "left         before it had joined the run"),
        ("{}\n", 2, "the standard input is not a run's key (Object missing"),
    ],
)
def test_a_machine_that_waits_for_its_key(given: str, code: int, said: str, tmp_path: Path) -> None:
    """It has begun, as its first line says. An order, the run's end, or that of the launcher ends it in
    order, also where a shell has started it in its background, deaf to INT; what is no key is refused, and
    not shown."""
    words = shlex.join(["exec", *JOIN])
    done = subprocess.run(
        ["sh", "-c", f"trap '' INT; {words}"],
        input=given,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done
    first, *rest = (done.stdout + done.stderr).splitlines()
    assert first.startswith("machine ") and first.endswith("waits for the run's key")
    assert len(rest) == 1 and said in rest[0] and list(tmp_path.iterdir()) == []


def test_an_order_ends_one_that_asks_the_run_in_vain(tmp_path: Path) -> None:
    """The key has come, and nobody answers at its address: it does not wait for an answer before it obeys."""
    silent = socket.create_server(("127.0.0.1", 0))
    silent.settimeout(30)
    key, _ = new_join_key("store", "127.0.0.1")
    key.port = silent.getsockname()[1]
    write_join_key(tmp_path / JOIN_FILE, key)
    process = subprocess.Popen(
        JOIN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline().startswith("machine ")
    process.stdin.write((tmp_path / JOIN_FILE).read_text() + "\n")
    with silent, silent.accept()[0]:
        said, _ = process.communicate("leave\n", timeout=30)
    assert (process.returncode, said.split()[0]) == (0, "left")


def test_an_earlier_runs_key_is_not_handed_over(tmp_path: Path) -> None:
    """Nor one from before the controller that is started: each puts its own in its place. To a run that goes
    on the present one is right, and none will come where there is none."""
    file = tmp_path / JOIN_FILE
    with pytest.raises(LaminarError, match=r"join.key is missing: the run has ended, or does not use"):
        RunKey(tmp_path, is_made_anew=False)
    assert RunKey(tmp_path, is_made_anew=True).line() == ""
    write_join_key(file, new_join_key("first", "h")[0])
    key = RunKey(tmp_path, is_made_anew=True)
    assert key.line() == "" and RunKey(tmp_path, is_made_anew=False).line() == file.read_text()
    os.link(file, tmp_path / "kept")  # its number is not given to the next one
    write_join_key(file, new_join_key("second", "h")[0])
    assert key.line() == file.read_text() and "\n" not in key.line() and "second" in key.line()


def test_laminar_is_found_at_the_same_path_or_else_on_the_path(tmp_path: Path) -> None:
    """By the line that ssh gets, in a shell; where neither has it, the code says that it is not there."""
    line = join_line(tmp_path / "a b", ["NCCL_DEBUG=INFO"], 2, tied=True)
    for folder in ("a b", "other"):
        (tmp_path / folder).mkdir()
    path = f"{tmp_path / 'other'}:/usr/bin:/bin"

    def ran() -> tuple[int, str]:
        done = subprocess.run(
            ["sh", "-c", line], env={"PATH": path}, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert ran() == (127, "")
    for folder, said in (("other", "found on PATH"), ("a b", "found at the same path")):
        program = tmp_path / folder / "laminar"
        program.write_text(f'#!/bin/sh\necho "{said}: $NCCL_DEBUG $*"\n')
        program.chmod(0o755)
        assert ran() == (0, f"{said}: INFO join --key - --replicas=2 --tied\n")
