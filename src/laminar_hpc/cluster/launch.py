"""One torchrun with all roles on this machine, in a session of its own, watched over until everything has ended.

Ctrl-C, TERM and USR1 become a stop message to the controller, so that the ranks leave by themselves and the exit code is 0; a second
one ends the session at once. torchrun's own chatter goes to a log, our one-line errors to the terminal.
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
from pathlib import Path

from laminar_hpc.cluster.folders import ENGINE_FOLDER_PREFIX, remove_abandoned
from laminar_hpc.cluster.processes import die_with_parent
from laminar_hpc.cluster.roles import assign_roles
from laminar_hpc.cluster.stop import request_stop
from laminar_hpc.config.check import derive
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.weights.layout import clean_leftovers

_ERROR = "laminar: error:"
_REPEAT_SECONDS = 2.0  # `timeout` and some terminals deliver one wish twice at once
_GONE_SECONDS = 20.0  # a session that was told to end is gone after this


class Launch:
    """A running torchrun and what it says."""

    def __init__(self, config: RunConfig, overrides: list[str], world_size: int) -> None:
        self._config, self._world = config, world_size
        self._stops, self._asked = 0, 0.0
        self._chatter: deque[str] = deque(maxlen=2000)
        self._errors = 0
        self._meeting = os.memfd_create("torchrun")  # torchrun's own store in place of a TCP one, which listens on all interfaces
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            "--rdzv-conf=store_type=file,keep_alive_interval=3600",  # nobody else listens for it, and each sign of life stays in the file
            f"--rdzv-endpoint=/proc/{os.getpid()}/fd/{self._meeting}",
            f"--rdzv-id={uuid.uuid4()}",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={world_size}",
            "-m",
            "laminar_hpc",
            *overrides,
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith(_ERROR) and not self._errors:  # the first is the cause, what follows are its consequences
                self._errors += 1
                print(line, end="", file=sys.stderr, flush=True)
            else:
                self._chatter.append(line)

    def on_signal(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self._stops and now - self._asked < _REPEAT_SECONDS:
            return
        self._stops, self._asked = self._stops + 1, now
        name = signal.Signals(number).name
        if self._stops == 1:
            try:
                request_stop(Path(self._config.run_dir), name, seconds=2.0)
                return
            except LaminarError:
                print(f"laminar: {name} before the run was up: ending it", file=sys.stderr, flush=True)
        self._end()

    def _end(self) -> None:
        """Ends the session that this launch started, and nothing else."""
        os.killpg(self._process.pid, signal.SIGTERM)
        timer = threading.Timer(_GONE_SECONDS, lambda: os.killpg(self._process.pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    def wait(self) -> int:
        """Until torchrun has ended; returns our exit code and explains a death that no rank could explain itself."""
        while True:
            try:
                code = self._process.wait()
                break
            except InterruptedError:
                continue
        self._reader.join(2)
        self._write_log()
        clean_leftovers(self._config.relay.shm_dir)
        remove_abandoned(Path(tempfile.gettempdir()), ENGINE_FOLDER_PREFIX)
        if code and not self._errors and (why := self._explain()):
            print(f"{_ERROR} {why}", file=sys.stderr, flush=True)
        return 0 if code == 0 else 1

    def _write_log(self) -> None:
        logs = Path(self._config.run_dir) / "logs"
        if logs.is_dir():
            (logs / "torchrun.log").write_text("".join(self._chatter))

    def _explain(self) -> str:
        """Which rank died first, and how, from torchrun's report of the root cause."""
        text = "".join(self._chatter)
        root = text[text.find("Root Cause") :] if "Root Cause" in text else text
        rank, code = re.search(r"rank\s*:\s*(\d+)", root), re.search(r"exitcode\s*:\s*(-?\d+)", root)
        logs = Path(self._config.run_dir) / "logs"
        if not rank or not code:
            return f"the job ended without a word; see {logs}"
        derived = derive(self._config)
        role = assign_roles(derived.trainer_ranks, derived.rollout_ranks, 1, self._world, self._config.relay.lanes)[int(rank.group(1))]
        number = int(code.group(1))
        how = f"was killed by {signal.Signals(-number).name}" if number < 0 else f"ended with exit code {number}"
        return (
            f"{role.role} {role.index} {how}; see {logs / f'{role.role}{role.index}.log'}, then go on with the same command and resume=auto"
        )


def run_torchrun(config: RunConfig, overrides: list[str], world_size: int) -> int:
    """Runs the job to its end. Exit code 0 when it is done or was stopped in order."""
    launch = Launch(config, overrides, world_size)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, launch.on_signal)
    return launch.wait()
