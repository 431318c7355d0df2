"""Runs the user's reward function in worker processes, so that nothing it does can stop a rollout.

A rollout worker owns one RewardPool and awaits `score` per trajectory, up to reward.slots at a time. A call that raises, hangs, or returns
something else than a reward scores reward.score_on_failure, with the reason. A worker that dies or no longer answers is replaced; the calls
that were in it are done again, once, each alone in a process, so that the guilty one harms no other. A worker in which a plain function is
stuck gets no more calls, finishes what it has, and is replaced.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import msgspec

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RewardConfig
from laminar_hpc.environments.reward_worker import Call, Ready, Result, Setup, decode_from_worker, read_frame, write_frame

IMPORT_SECONDS = 60.0  # longest import of the user's module
GRACE_SECONDS = 1.0  # a worker times its calls itself; one that says nothing for this much longer does not run any more


@dataclass(frozen=True)
class Score:
    """The reward of one trajectory. `error` is "" or says what the function did wrong; times are seconds since the epoch."""

    reward: float
    parts: dict[str, float]
    error: str
    t0: float
    t1: float


class _WorkerLost(Exception):
    """The worker died, or had to be killed, before it answered."""


class _Worker:
    """One process. `calls` are those in flight; `retired` means that it gets no more."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.calls: dict[int, asyncio.Future[Result]] = {}
        self.retired = False
        self._process: subprocess.Popen | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task | None = None

    async def start(self) -> None:
        """Raises LaminarError when the process does not come up or the function is not there."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "laminar_hpc.environments.reward_worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=ours)
        write_frame(self._writer, Setup(self.config.function, self.config.timeout_seconds))
        try:
            ready = decode_from_worker(await asyncio.wait_for(read_frame(reader), IMPORT_SECONDS))
        except asyncio.IncompleteReadError:
            raise LaminarError(
                f"reward.function='{self.config.function}': its process ended with {self._process.wait()} during the import"
            ) from None
        except TimeoutError:
            raise LaminarError(f"reward.function='{self.config.function}': its import took longer than {IMPORT_SECONDS:g} s") from None
        assert isinstance(ready, Ready)
        if ready.error:
            raise LaminarError(ready.error)
        self._listener = asyncio.create_task(self._listen(reader))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                result = decode_from_worker(await read_frame(reader))
                self.retired |= result.stuck
                if waiter := self.calls.get(result.id):
                    waiter.set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):  # the last: its function wrote into our socket
            self.lose()

    def lose(self) -> None:
        """The process is gone, or is to be: everything in flight is lost with it."""
        self.retired = True
        for waiter in self.calls.values():
            if not waiter.done():
                waiter.set_exception(_WorkerLost())

    async def run(self, call: Call) -> Result:
        """Raises _WorkerLost."""
        assert self._writer is not None
        self.calls[call.id] = waiter = asyncio.get_running_loop().create_future()
        try:
            write_frame(self._writer, call)
            return await asyncio.wait_for(waiter, self.config.timeout_seconds + GRACE_SECONDS)
        except TimeoutError:
            self.lose()
            raise _WorkerLost from None
        finally:
            del self.calls[call.id]

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)


class RewardPool:
    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._per_worker = -(-config.slots // config.workers)
        self._workers: list[_Worker] = []
        self._leaving: dict[asyncio.Task, _Worker] = {}  # retired ones that still answer their last calls
        self._ids = itertools.count()
        self._free = asyncio.Semaphore(self._per_worker * config.workers)
        self._changing = asyncio.Lock()
        self._alone = asyncio.Lock()
        self._quarantine: _Worker | None = None  # where calls of a lost worker are done again, one at a time

    async def start(self) -> None:
        """Raises LaminarError when the function is missing, is not callable, or cannot be imported."""
        self._workers = [_Worker(self.config) for _ in range(self.config.workers)]
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
        except BaseException:
            await self.close()
            raise

    async def score(self, prompt: str, response: str, row: dict) -> Score:
        """The reward of one response. Raises LaminarError only when no worker can be started any more."""
        call = Call(next(self._ids), prompt, response, row)
        async with self._free:
            worker = await self._pick()
            t0 = time.time()
            try:
                result = await worker.run(call)
            except _WorkerLost:
                result = await self._run_alone(call, t0)
        if result.error:
            return Score(self.config.score_on_failure, {}, result.error, result.t0, result.t1)
        return Score(result.reward, result.parts, "", result.t0, result.t1)

    async def _pick(self) -> _Worker:
        """The working worker with the fewest calls; retired ones are replaced on the way."""
        async with self._changing:
            for place, worker in enumerate(self._workers):
                if worker.retired:
                    self._retire(worker)
                    self._workers[place] = fresh = _Worker(self.config)
                    await fresh.start()
            return min(self._workers, key=lambda worker: len(worker.calls))

    async def _run_alone(self, call: Call, t0: float) -> Result:
        """Second and last try of a call whose worker was lost, with nothing beside it."""
        async with self._alone:
            if self._quarantine is None or self._quarantine.retired:
                if self._quarantine is not None:
                    self._retire(self._quarantine)
                self._quarantine = _Worker(self.config)
                await self._quarantine.start()
            try:
                return await self._quarantine.run(call)
            except _WorkerLost:
                text = f"its process died or stopped answering, twice (limit {self.config.timeout_seconds:g} s)"
                return Result(call.id, 0.0, {}, text, t0, time.time())

    def _retire(self, worker: _Worker) -> None:
        """Ends a worker once its last call is answered, which its time limit bounds."""

        async def end() -> None:
            while worker.calls:
                await asyncio.wait(list(worker.calls.values()))
                await asyncio.sleep(0)  # their owners take them off the list
            await worker.stop()

        task = asyncio.create_task(end())
        self._leaving[task] = worker
        task.add_done_callback(self._leaving.pop)

    async def close(self) -> None:
        """Ends all workers, also those with calls in flight."""
        workers = [*self._workers, *self._leaving.values(), *([self._quarantine] if self._quarantine else [])]
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*(worker.stop() for worker in workers))
        self._workers, self._quarantine = [], None
