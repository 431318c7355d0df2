"""A copy of the source tree, so that no test of packaging writes into the real one."""

import shutil
from pathlib import Path

import pytest

from helpers.paths import ROOT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What `make setup` and `pip install` read, copied to a folder of its own."""
    copy = tmp_path / "tree"
    for name in ("src", "conf", "csrc", "examples", "requirements", "slurm"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        )
    for name in ("setup.py", "MANIFEST.in", "pyproject.toml", "Makefile", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy
