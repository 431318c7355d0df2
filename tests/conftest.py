"""How tests run side by side (`make test WORKERS=N`): whole files go to a worker, so that their fixtures are
made once, and whole folders where several files share engines, trainer processes or a Slurm.

Property tests are bounded by their number of examples: one with a time limit would fail on a busy machine,
and then look for a smaller example for minutes."""

from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from laminar_hpc.machine.collector import importing

settings.register_profile("by-examples", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("by-examples")

FOLDERS = ("tests/trainer/", "tests/rollout/", "tests/slurm/")
FILES = ("tests/system/", "tests/packaging/", "tests/simulator/test_commands.py", "tests/weights/kernels/")
LONG = (*FOLDERS, *FILES)  # they come first, whole folders before files: what takes long must not begin last


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return next((name for name in FOLDERS if nodeid.startswith(name)), super()._split_scope(nodeid))

    def remove_node(self, node: WorkerController) -> str | None:
        """A test in which a worker dies has failed, and is not run again; xdist 3.8 would give other workers
        the files that are done as well, and wait for them for ever."""
        work = self.assigned_work.pop(node)
        left = [(file, test) for file, tests in work.items() for test, done in tests.items() if not done]
        if not left:
            return None
        file, test = left[0]
        work[file][test] = True
        self.workqueue.update({name: tests for name, tests in work.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return test

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # else it has only just been started
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Files of tests import SGLang, torch and more."""
    with importing():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (not item.nodeid.startswith(FOLDERS), not item.nodeid.startswith(LONG)))
