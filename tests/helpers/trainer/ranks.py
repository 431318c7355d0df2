"""Trainer worlds of several real processes (gloo), started once and used for many cases.

A test calls `Ranks.run(world, "module:function", **arguments)` with a module of this folder. The first
`world` processes form a fresh torch.distributed world, call the function and are torn down again; the results
come back in the order of the ranks. Each process is this file, run as a script. No GPU is seen by them, so
that the tests are the same everywhere.
"""

import contextlib
import gc
import importlib
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from helpers.paths import environment

_SECONDS = 280.0  # of one case, the start of its processes included; pytest's own limit is 300
# of one set of processes: a gloo group that is destroyed leaves a thread behind that wakes 100 times a second
_CASES = 16


def _send(line: socket.socket, content: object) -> None:
    frame = pickle.dumps(content)
    line.sendall(struct.pack("<Q", len(frame)) + frame)


def _receive(line: socket.socket) -> object:
    def exactly(n: int) -> bytes:
        parts = bytearray()
        while len(parts) < n:
            part = line.recv(n - len(parts))
            if not part:
                raise EOFError("the other end has gone")
            parts += part
        return bytes(parts)

    return pickle.loads(exactly(struct.unpack("<Q", exactly(8))[0]))


class Ranks:
    """Processes are started when first needed. After a case that hangs or dies all are ended, and the next
    case starts new ones."""

    def __init__(self) -> None:
        self._processes: list[tuple[subprocess.Popen, socket.socket]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="laminar-ranks-")
        self._jobs = 0

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        here = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._processes.append((subprocess.Popen(command, env=here, pass_fds=[theirs.fileno()]), ours))
        theirs.close()

    def run(self, world: int, function: str, seconds: float = _SECONDS, **arguments: object) -> list:
        """What the function returned on each rank. Raises AssertionError with a rank's traceback when it
        raised, or none came in time."""
        if self._jobs % _CASES == 0:
            self.close()
        while len(self._processes) < world:
            self._start()
        self._jobs += 1
        lines = [line for _, line in self._processes[:world]]
        for rank, line in enumerate(lines):
            _send(
                line, (str(Path(self._folder.name) / f"store{self._jobs}"), rank, world, function, arguments)
            )
        deadline, results, failed = time.monotonic() + seconds, [], []
        for rank, line in enumerate(lines):
            line.settimeout(
                max(
                    0.01, (deadline if not failed else min(deadline, time.monotonic() + 5)) - time.monotonic()
                )
            )
            try:
                good, result = _receive(line)
            except (TimeoutError, EOFError, ConnectionError) as error:
                good, result = False, f"{type(error).__name__}: {error}"
            results.append(result)
            if not good:
                failed.append(f"rank {rank} of {world}: {result}")
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return results

    def close(self) -> None:
        for process, line in self._processes:
            line.close()
            process.kill()
            process.wait()
        self._processes.clear()


def _one(store: str, rank: int, world: int, function: str, arguments: dict) -> object:
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        module, name = function.split(":")
        return getattr(importlib.import_module(f"helpers.trainer.{module}"), name)(**arguments)
    finally:
        with contextlib.suppress(Exception):
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        gc.collect()  # what holds a group holds its threads, of which one wakes 100 times a second


def _serve(line: socket.socket) -> None:
    with contextlib.suppress(EOFError):
        while True:
            job = _receive(line)
            try:
                answer = (True, _one(*job))
            except BaseException:
                answer = (False, traceback.format_exc())
            _send(line, answer)


if __name__ == "__main__":
    import laminar_hpc.trainer  # noqa: F401 (before torch compiles anything)
    from laminar_hpc.machine.processes import die_with_parent

    die_with_parent()
    _serve(socket.socket(fileno=int(sys.argv[1])))
