"""README.md: what it tells a newcomer to type works, in its order, as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

BLOCK = re.compile(r"^```\n(.*?)^```", re.M | re.S)
COMMANDS = re.compile(r"(?:make|laminar|cd|\.) ")
# make only says what it would do, here, where the Makefile is; a GPU is not needed for a dry run
SHELL = """set -e
make() { command make -n -C "$ROOT" "$@"; }
laminar() {
    case "$*" in
        train*one_gpu*) command laminar "$@" dry_run=true ;;
        train*) command laminar "$@" $MORE ;;
        *) command laminar "$@" ;;
    esac
}
"""


@pytest.mark.parametrize("more", ["dry_run=true", pytest.param("", marks=pytest.mark.slow)])
def test_its_commands_work_one_after_the_other(more: str, tmp_path: Path) -> None:
    """Promise: in a fresh folder, with the environment that `make` sets up; what needs a GPU as a dry run,
    the rest too or, with the long tests, for real."""
    blocks = [block for block in BLOCK.findall((ROOT / "README.md").read_text()) if COMMANDS.match(block)]
    assert len(blocks) >= 2
    script = SHELL + "".join(blocks).replace(". .venv/bin/activate", f". {sys.prefix}/bin/activate")
    assert sys.prefix in script
    environment = os.environ | {"ROOT": str(ROOT), "MORE": more}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("batch of a step ") >= 2 and "494,032,768" in done.stdout
    assert "laminar train experiment=demo" in done.stdout
    assert (tmp_path / "mine/runs/mine/report.html").exists() == (not more)
