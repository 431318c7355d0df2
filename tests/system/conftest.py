"""Runs of this folder's tests."""

from collections.abc import Iterator

import pytest

from helpers.runs import Run


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """Else the run of a test that fails would keep the processors busy for those that follow."""
    yield
    for run in Run.started:
        run.process.kill()  # its ranks die with it
    Run.started.clear()
