"""What each trainer rank has written of a checkpoint, told to rank 0 over the store of the trainer world.

Used by the threads that write (in_flight.py). Not over a group of the ranks: that would be another mesh of
sockets, or collectives of two threads on one group. Every wait is bounded.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch._C._distributed_c10d import Store

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.machine.files.durable import FileSum
from laminar_hpc.trainer.megatron.checkpoint_writer import Written

_POLL_SECONDS = 0.2


class CheckpointPart(msgspec.Struct):
    """A rank's part of a checkpoint: its files, and where in them Megatron finds what; or why it failed."""

    files: dict[str, FileSum] = {}
    written: list[Written] = []
    wrong: str = ""


class Saved(NamedTuple):
    """A checkpoint that has its name. `seconds` since it was begun, of which training stood still for
    `stalled`; `state_hash` is empty without checkpoint.state_hash."""

    step: int
    path: Path
    seconds: float
    stalled: float
    state_hash: str


class Reports:
    """Of one checkpoint, which `name` tells from all others of this world."""

    def __init__(self, store: Store, name: str, ranks: int) -> None:
        self._store = store
        self._keys = [f"checkpoint/{name}/{rank}" for rank in range(ranks)]

    def tell(self, rank: int, part: CheckpointPart) -> None:
        self._store.set(self._keys[rank], msgspec.json.encode(part).decode())

    def gather(self, wait: Callable[[float], None], seconds: float) -> list[CheckpointPart]:
        """The parts of all ranks, in their order; they are forgotten then. `wait(seconds)` lets a moment
        pass, or raises. Raises LaminarError that names a rank which failed, or those that did not come."""
        parts: dict[int, CheckpointPart] = {}
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in range(len(self._keys)) if rank not in parts]:
            for rank in missing:
                if self._store.check([self._keys[rank]]):
                    parts[rank] = msgspec.json.decode(self._store.get(self._keys[rank]), type=CheckpointPart)
                    self._store.delete_key(self._keys[rank])
                    if wrong := parts[rank].wrong:
                        raise LaminarError(f"trainer {rank} cannot write its part of a checkpoint: {wrong}")
            if len(parts) < len(self._keys):
                if time.monotonic() > deadline:
                    raise LaminarError(
                        f"trainer 0 waited {seconds:.0f} s for the parts of trainers "
                        f"{', '.join(map(str, missing[:8]))} of a checkpoint to be on disk; see their logs"
                    )
                wait(_POLL_SECONDS)
        return [parts[rank] for rank in range(len(self._keys))]
