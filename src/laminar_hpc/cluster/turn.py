"""A spare controller is started before its turn, so that it has its imports done when that comes. Its job
(jobs/spare.py) says when, by a file on this machine whose path is in the environment. In it is what was seen
meanwhile of the lock of the run, which then need not be watched once more.
"""

import os
import time
from pathlib import Path

import msgspec

from laminar_hpc.cluster.lock_owner import Watched

VARIABLE = "LAMINAR_TURN"
_LOOK_SECONDS = 0.1


def give_turn(path: Path, watched: Watched) -> None:
    """To the process that waits for `path`."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(msgspec.json.encode(watched))
    temporary.replace(path)


def await_turn() -> Watched:
    """Returns at once in a process that nobody has told to wait."""
    given = os.environ.get(VARIABLE, "")
    while given and not Path(given).exists():  # it dies with its parent, which has the time limit
        time.sleep(_LOOK_SECONDS)
    return msgspec.json.decode(Path(given).read_bytes(), type=Watched) if given else {}
