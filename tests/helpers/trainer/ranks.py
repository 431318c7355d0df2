"""Trainer worlds of several real processes (gloo), started once and used for many cases.

A test calls `Ranks.run(world, "module:function", **arguments)` with a module of this folder. The first
`world` processes form a fresh torch.distributed world, call the function and are torn down again; the results
come back in the order of the ranks. The processes are forks of one that has imported torch and Megatron-core,
which takes seconds of a processor. No GPU is seen by them, so that the tests are the same everywhere.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

from helpers.paths import environment
from laminar_hpc.machine.processes import die_with_parent

_SECONDS = 280.0  # of one case, the start of its processes included; pytest's own limit is 300
# of one set of processes: a gloo group that is destroyed leaves a thread behind that wakes 100 times a second
_CASES = 16
_FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = ["laminar_hpc.trainer", "helpers.trainer.cases", "helpers.trainer.checkpointing"]


class Ranks:
    """Processes are started when first needed. After a case that hangs or dies all are ended, and the next
    case starts new ones."""

    def __init__(self) -> None:
        self._processes: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="laminar-ranks-")
        self._jobs = 0
        _FORKS.set_forkserver_preload(_IMPORTED)

    def _start(self) -> None:
        ours, theirs = _FORKS.Pipe()
        process = _FORKS.Process(target=_serve, args=(theirs,))
        here = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
        with patch.dict(os.environ, here):  # the first start is also that of the process which is forked
            process.start()
        self._processes.append((process, ours))
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
            line.send((str(Path(self._folder.name) / f"store{self._jobs}"), rank, world, function, arguments))
        deadline, results, failed = time.monotonic() + seconds, [], []
        for rank, line in enumerate(lines):
            until = deadline if not failed else min(deadline, time.monotonic() + 5)
            try:
                if not line.poll(max(0.01, until - time.monotonic())):
                    raise TimeoutError("it has not answered")
                good, result = line.recv()
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
            process.join()
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


def _serve(line: Connection) -> None:
    die_with_parent()
    with contextlib.suppress(EOFError):
        while True:
            job = line.recv()
            try:
                answer = (True, _one(*job))
            except BaseException:
                answer = (False, traceback.format_exc())
            line.send(answer)
