"""One torchrun with all roles on this machine, in a session of its own, watched over until everything has
ended.

Ctrl-C, TERM, USR1 and HUP become a stop message to the controller, so that the ranks leave by themselves and
the exit code is 0; a second one ends the session at once. torchrun's own chatter goes to a log, our one-line
errors to the terminal.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from pathlib import Path

from laminar_hpc.cluster.address import read_address
from laminar_hpc.cluster.folders import ENGINE_FOLDER_PREFIX, remove_abandoned, remove_dead_slots
from laminar_hpc.cluster.full_disk import NO_ROOM
from laminar_hpc.cluster.processes import die_with_parent
from laminar_hpc.cluster.roles import assign_roles
from laminar_hpc.cluster.run_lock import refuse_if_held
from laminar_hpc.cluster.stop import request_stop
from laminar_hpc.config.check import derive
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.schema import RunConfig

_ERROR = "laminar: error:"
_REFUSED = f"{_ERROR} refused:"  # an error seen before anything began
GO_ON = ", then go on with the same command and resume=auto"
REFUSED, PERMANENT = 2, 3  # exit codes of a rank: before the run began; failed, and would fail again
# in the environment of launchers that jobs/node.py starts: the file that says what its USR1 is for. They do
# not hear TERM, which a Slurm may send to all processes of a job
DEAF = "LAMINAR_DEAF_TO_TERM"
# there too: its trainers leave a run that goes on, as their job is its own
LEAVES_ALONE = "LAMINAR_LEAVES_ALONE"
JOINED_AS = "laminar: joined as"  # ROLE INDEX, by a process that did not know its number when it started
REPEAT_SECONDS = 2.0  # `timeout` and some terminals send the same signal twice at once
# for a controller to take a stop: turns of seconds are normal, and the shared file system may stand still;
# and for one that is dead, or not ready yet
_LIVE_SECONDS, _DEAD_SECONDS = 10.0, 2.0
GONE_SECONDS = 20.0  # a session that was told to end is gone after this


def reason_of(number: int) -> str:
    """What is recorded as the reason of a stop by this signal: its name, or what jobs/node.py was told."""
    told_in = os.environ.get(DEAF)
    if told_in and number == signal.SIGUSR1:
        with suppress(OSError):
            return Path(told_in).read_text() or signal.Signals(number).name
    return signal.Signals(number).name


class Launch:
    """A running torchrun and what it says."""

    def __init__(self, config: RunConfig, overrides: list[str], world_size: int) -> None:
        """With config.restarts the first error is kept for `print_error`, as it may not be the end."""
        self._config, self._world = config, world_size
        self._causes: list[str] = []  # of a failure: one line, or one per mistake of a refused configuration
        self._told = 0  # how many of them the user has seen
        self.is_permanent = False  # it would fail again for sure
        self.joined_as = ""  # "rollout 3": what a rollout says of itself, once the controller has numbered it
        self._stops, self._asked, self._is_told = 0, 0.0, False
        self._chatter: deque[str] = deque(maxlen=2000)
        self._refused = False
        # torchrun's own store in place of a TCP one, which listens on all interfaces
        self._meeting = os.memfd_create("torchrun")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self._runner(), "laminar_hpc", *overrides],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={"OMP_NUM_THREADS": "1", **os.environ, **self._environment()},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _runner(self) -> list[str]:
        """What runs the module laminar_hpc."""
        return [
            "torch.distributed.run",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            # nobody else listens for it, and each sign of life stays in the file
            "--rdzv-conf=store_type=file,keep_alive_interval=3600",
            f"--rdzv-endpoint=/proc/{os.getpid()}/fd/{self._meeting}",
            f"--rdzv-id={uuid.uuid4()}",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={self._world}",
            "-m",
        ]

    def _environment(self) -> dict[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith(_REFUSED) and (self._refused or not self._causes):
                self._refused = True  # each line is a mistake of its own
                self._failed(line.removeprefix(_REFUSED))
            elif line.startswith(_ERROR) and not self._causes:  # what follows the first are its consequences
                self._failed(line.removeprefix(_ERROR))
            elif line.startswith(JOINED_AS):
                self.joined_as = line.removeprefix(JOINED_AS).strip()
            else:
                self._chatter.append(line)

    @property
    def cause(self) -> str:
        """Of a failure, in one line."""
        return "; ".join(self._causes)

    def _failed(self, text: str) -> None:
        self._causes.append(text.strip())
        if not self._config.restarts:
            self.print_error()

    def on_signal(self, number: int) -> None:
        if number == signal.SIGTERM and os.environ.get(DEAF):
            return
        now = time.monotonic()
        if self._stops and now - self._asked < REPEAT_SECONDS:
            return
        self._stops, self._asked = self._stops + 1, now
        name = reason_of(number)
        if self._stops == 1:
            try:
                if not request_stop(Path(self._config.run_dir), name, self._patience()):
                    text = "there is no controller now, the next one gets the request"
                    print(f"laminar: {name}: {text}", file=sys.stderr, flush=True)
                return
            except (LaminarError, OSError):
                print(f"laminar: {name} before the run was up: ending it", file=sys.stderr, flush=True)
        self.end()

    def _patience(self) -> float:
        run_dir = Path(self._config.run_dir)
        try:
            refuse_if_held(run_dir)
        except Refused:
            address = read_address(run_dir)
            return _LIVE_SECONDS if address and address.store_id else _DEAD_SECONDS
        return _DEAD_SECONDS

    def end(self) -> None:
        """Ends the session that this launch started, and nothing else."""
        self._is_told = True
        self._kill(signal.SIGTERM)
        timer = threading.Timer(GONE_SECONDS, self._kill, [signal.SIGKILL])
        timer.daemon = True
        timer.start()

    def _kill(self, number: int) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def print_error(self, more: str = "") -> None:
        """Tells the user why it failed, each line once."""
        new, self._told = self._causes[self._told :], len(self._causes)
        for text in new:
            print(f"{_ERROR} {text}{more}", file=sys.stderr, flush=True)

    def wait(self) -> int:
        """Until torchrun has ended; returns our exit code, and finds the cause if no rank could give it."""
        while True:
            try:
                code = self._process.wait()
                break
            except InterruptedError:
                continue
        self._reader.join(2)
        os.close(self._meeting)
        self._write_log()
        remove_dead_slots(self._config.relay.shm_dir)
        remove_abandoned(Path(tempfile.gettempdir()), ENGINE_FOLDER_PREFIX)
        if code == 0:
            return 0
        rank, number = self._root_cause(code)
        if not self._causes and (why := self._explain(rank, number)):
            self._causes.append(why)
        # another rank may have ended before the one whose disk is full
        self.is_permanent = self._refused or number in (REFUSED, PERMANENT) or NO_ROOM in self.cause
        return REFUSED if self._refused or number == REFUSED else 1

    def _write_log(self) -> None:
        logs = Path(self._config.run_dir) / "logs"
        with suppress(OSError):  # a full disk, which the run itself has named
            if logs.is_dir():
                with open(logs / "torchrun.log", "a") as file:
                    file.writelines(self._chatter)

    def _root_cause(self, _: int) -> tuple[int | None, int]:
        """The rank that ended first, and its exit code, by torchrun's report; (None, 1) without one."""
        text = "".join(self._chatter)
        root = text[text.find("Root Cause") :] if "Root Cause" in text else text
        rank, code = re.search(r"rank\s*:\s*(\d+)", root), re.search(r"exitcode\s*:\s*(-?\d+)", root)
        return (int(rank.group(1)), int(code.group(1))) if rank and code else (None, 1)

    def _explain(self, rank: int | None, number: int) -> str:
        """Which rank died first, and how; empty where nobody needs to be told."""
        logs = Path(self._config.run_dir) / "logs"
        if rank is None:
            return f"the job ended without an error message; see {logs}"
        derived = derive(self._config)
        lanes = self._config.relay.lanes
        role = assign_roles(derived.trainer_ranks, derived.rollout_ranks, 1, self._world, lanes)[rank]
        how = (
            f"was killed by {signal.Signals(-number).name}"
            if number < 0
            else f"ended with exit code {number}"
        )
        return f"{role.role} {role.index} {how}; see {logs / f'{role.role}{role.index}.log'}{GO_ON}"
