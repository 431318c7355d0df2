"""run_dir/status.json: what a run is doing now, rewritten once a second by the controller, read by `laminar
top`.

A snapshot, not a history: it stays behind as the last word of a run that ended or died. Written through a
rename, so that a reader never sees half of it; it is not synced to the disk, as nothing depends on it.
"""

import logging
import time
from pathlib import Path

import msgspec

from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.machine.files.whole import write_whole

log = logging.getLogger(__name__)
STATUS_FILE = "status.json"


class RankStatus(msgspec.Struct, omit_defaults=True):
    """A worker that is in the run. `load` of rollouts only; None = no verified weights yet."""

    role: str
    index: int
    pid: int
    machine: str
    heard: float  # seconds since the epoch
    weight_id: int | None = None
    weight_step: int | None = None
    load: ReplicaLoad | None = None


class Queues(msgspec.Struct):
    """Prompt groups (all but `replicas_waiting`)."""

    generating: int  # granted, with trajectories that have no last token or score
    ready: int  # finished, for the trainer to take
    unscored: int  # trajectories that are generated and wait for their score
    evaluations: int  # evaluations under way or due
    replicas_waiting: int  # replicas that have asked for work and got none yet
    trainer_waits: str = ""  # why the trainer has no batch; empty = it does not wait


class Status(msgspec.Struct):
    """`time` is when it was written; seconds since the epoch."""

    time: float
    pid: int  # of the controller
    machine: str
    step: int
    steps: int
    stopping: str
    newest_weight_id: int | None  # that some relay holds
    ranks: list[RankStatus]
    queues: Queues
    rewards_scored: int = 0  # of this launch, evaluations included
    reward_errors: int = 0


def write(run_dir: Path, status: Status) -> None:
    """Writes the file. A full disk is logged: it ends no run for the sake of its display."""
    try:
        write_whole(run_dir / STATUS_FILE, msgspec.json.encode(status))
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / STATUS_FILE, error)


def read(run_dir: Path) -> Status | None:
    """The status; None if there is none, or one that another version of this program wrote."""
    try:
        return msgspec.json.decode((Path(run_dir) / STATUS_FILE).read_bytes(), type=Status)
    except (OSError, msgspec.DecodeError):
        return None


def last_seen(run_dir: Path) -> float:
    """When it was written, in seconds since the epoch; 0 where there is none."""
    status = read(run_dir)
    return status.time if status else 0.0


def age(status: Status) -> float:
    """Seconds since it was written."""
    return max(0.0, time.time() - status.time)
