"""Machines with real sshds, for the slow tests of this folder."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import machines
from helpers.machines import Machines


@pytest.fixture
def two() -> Iterator[Machines]:
    """Two machines; where they cannot be had a test is skipped, in CI it fails."""
    if why := machines.missing():
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="hosts"))
    found = Machines(folder, 2)
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(folder)
