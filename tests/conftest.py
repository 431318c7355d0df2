"""Which tests may run side by side (`make test WORKERS=N`): those of different files, so that a file's
fixtures are made once. Slurm's files count as one, as they share a cluster."""

import pytest
from xdist.scheduler import LoadFileScheduling


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "tests/slurm" if nodeid.startswith("tests/slurm/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)
