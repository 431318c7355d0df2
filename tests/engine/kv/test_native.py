"""The extension's core, compiled with the sanitizers, in a process of its own."""

import subprocess
from pathlib import Path

import pytest

from helpers.paths import ROOT

CSRC = ROOT / "csrc"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_core_is_clean(tmp_path, sanitizers):
    """Promise: no access outside a buffer, no undefined behaviour and no data race, in records (damaged too)
    and rings."""
    program = tmp_path / "check"
    sources = [str(CSRC / f"{name}.cpp") for name in ("chunks", "copy", "ring")]
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-maybe-uninitialized",
        f"-fsanitize={sanitizers}",
    ]
    command = [
        "g++",
        *flags,
        "-fno-sanitize-recover=all",
        "-pthread",
        f"-I{CSRC}",
        str(Path(__file__).with_name("native_check.cpp")),
    ]
    subprocess.run([*command, *sources, "-o", str(program)], check=True, timeout=600)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "clean\n", "")
