"""Synthetic runs that several tests read."""

from pathlib import Path

import pytest

from helpers import synthetic


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> tuple[Path, synthetic.Written]:
    """A run of 12 steps on two replicas that came to its end."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    return run_dir, synthetic.write(run_dir, steps=12)


@pytest.fixture(scope="session")
def resumed(tmp_path_factory) -> tuple[Path, synthetic.Written, synthetic.Written]:
    """A run that died after step 7 with a checkpoint of step 4, and went on from there to step 10."""
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    before = synthetic.write(run_dir, steps=7, crash=True)
    after = synthetic.write(run_dir, steps=10, start_step=4, start=before.end + 100.0, seed=1)
    return run_dir, before, after
