"""Virtual environments with the package verifiers, made for a test."""

import os
import subprocess
import venv
from pathlib import Path

import pytest

V1 = ["verifiers[ta]==0.4.0", "uv", "msgspec"]  # the last: for the agent of renderers
MAKING_SECONDS = 1800


def interpreter(folder: Path, packages: list[str]) -> str:
    """Of a new virtual environment; LAMINAR_TEST_VERIFIERS_0_4_0=PATH and so on name one that is there."""
    name = packages[0].partition("==")[2].replace(".", "_")
    if given := os.environ.get(f"LAMINAR_TEST_VERIFIERS_{name}"):
        return given
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    words = [python, "-m", "pip", "install", "--quiet", *packages]
    made = subprocess.run(words, capture_output=True, text=True, timeout=MAKING_SECONDS)
    if made.returncode:
        pytest.skip(f"{' '.join(packages)} cannot be installed: {made.stderr.strip().splitlines()[-1][:200]}")
    return python
