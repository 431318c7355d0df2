"""The processes of one start of a group of ranks: forked, heard, told to end, and how they ended.

Why a rank has ended is known from its exit code or signal, and from what it has reported
(line/agent_line.py). Each has a session of its own, so that Ctrl-C reaches the agent alone; none outlives its
agent.
"""

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_hpc.line.agent_line import VARIABLE, RankOrders, reported
from laminar_hpc.machine.processes import die_with_parent

_RANK = (sys.executable, "-m", "laminar_hpc")
_FAILED_SECONDS = 30.0  # ranks whom the failure of another one has left behind are killed after this


@dataclass(frozen=True)
class Ranks:
    """Ranks of one world here: which of each machine's `here` ones, and which of the machines this is."""

    places: Sequence[int]
    here: int
    node: int = 0
    nodes: int = 1


class Life:
    """The processes of one start of a group."""

    def __init__(self, words: Sequence[str], ranks: Ranks, orders: RankOrders, run_id: str) -> None:
        self.causes: list[str] = []  # of a failure: one line, or one per mistake of a refused configuration
        self.is_refused = False
        self.joined_as = ""
        self.to_start = 0  # rollouts that its controller has asked for
        self.failed: tuple[int, int] | None = None  # the rank that did so first, and its exit code
        self._kill_at = math.inf
        self._reports = os.memfd_create("reports")
        self._heard = 0
        self._chatter = os.memfd_create("stderr")  # a rank has its own log when it has joined the run
        orders = msgspec.structs.replace(orders, report_to=self._reports)
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun sets it
            **os.environ,
            "TORCHELASTIC_RUN_ID": run_id or str(uuid.uuid4()),
            VARIABLE: msgspec.json.encode(orders).decode(),
        }
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for place in ranks.places:
            rank = ranks.node * ranks.here + place
            own = {"RANK": rank, "LOCAL_RANK": place, "WORLD_SIZE": ranks.nodes * ranks.here}
            own["LOCAL_WORLD_SIZE"] = ranks.here
            self._running[rank] = subprocess.Popen(
                [*_RANK, *words],
                env=environment | {name: str(value) for name, value in own.items()},
                stderr=self._chatter,
                pass_fds=[self._reports],
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def look(self) -> bool:
        """Whether all have ended. After the first failure the others are told to end."""
        for rank, process in list(self._running.items()):
            if (code := process.poll()) is None:
                continue
            del self._running[rank]
            if code and self.failed is None:
                self.failed = rank, code
                self.end(_FAILED_SECONDS)
        self._hear()
        if time.monotonic() > self._kill_at:
            self.signal(signal.SIGKILL)
        return not self._running

    def _hear(self) -> None:
        said, self._heard = reported(self._reports, self._heard)
        for each in said:
            self.joined_as = each.joined_as or self.joined_as
            self.to_start += each.start
            # what follows the first error are its consequences; each mistake is one of its own
            if each.error and (not self.causes or (each.refused and self.is_refused)):
                self.is_refused = each.refused
                self.causes.append(each.error)

    def end(self, seconds: float, alone: bool = False) -> None:
        """Those that are there `seconds` later are killed. `alone`: without what they have started."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)
        self.signal(signal.SIGTERM, alone)

    def signal(self, number: int, alone: bool = False) -> None:
        for process in list(self._running.values()):
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    (os.kill if alone else os.killpg)(process.pid, number)

    def kill(self) -> None:
        """Returns when they are gone."""
        self.signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()

    def close(self, log: Path) -> None:
        """Keeps in `log` what they have printed before they had logs of their own."""
        with suppress(OSError):  # a full disk, which the run itself has named
            if (chatter := os.pread(self._chatter, 1 << 20, 0)) and log.parent.is_dir():
                with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                    file.write(chatter)
        os.close(self._reports)
        os.close(self._chatter)
