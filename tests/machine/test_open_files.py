"""The number of files that a process may have open, in processes of their own, as a lowered limit stays."""

import subprocess
import sys

import pytest

CODE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from laminar_hpc.machine.files.open_files import allow_connections
from laminar_hpc.config.errors import LaminarError
try:
    allow_connections({others}, meshes={meshes})
except LaminarError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits(soft: int, hard: int, others: int, meshes: bool = True) -> list[str]:
    code = CODE.format(soft=soft, hard=hard, others=others, meshes=meshes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_limit_is_raised_or_the_reason_said() -> None:
    """Of 768 trainer ranks each needs thousands; a small run leaves the limit as it is."""
    assert limits(256, 4096, 2) == ["272 4096"]
    assert limits(1024, 4096, 40) == ["1024 4096"]
    assert limits(1024, 4096, 768) == ["4096 4096"]
    assert limits(1024, 8192, 2000, meshes=False) == ["6352 8192"], "with room for strangers"
    assert limits(1024, 2304, 2000, meshes=False) == ["2304 2304"]
    refused, unchanged = limits(1024, 2048, 768)
    assert "connections to 768 others and so about 2560 open files, and this machine allows 2048" in refused
    assert "ulimit -Hn" in refused and unchanged == "1024 2048"


ROLLOUT = """
import resource
from types import SimpleNamespace
from laminar_hpc.rollout import role
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
role.engine_factory = role.RolloutWorker = role.watched = lambda *_: None
role.event_loop.run = lambda _: print(*resource.getrlimit(resource.RLIMIT_NOFILE))
role.run(SimpleNamespace(config=None, index=0, run_dir=None))
"""


@pytest.mark.parametrize("hard", [512, 8192])
def test_a_rollout_has_files_for_its_environments(hard: int) -> None:
    """Of 1,024 environments each has a process and connections, beside those of the engine's requests: with a
    shell's usual limit the replica would end by them."""
    code = ROLLOUT.format(hard=hard)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hard), str(hard)]
