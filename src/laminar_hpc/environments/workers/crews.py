"""The workers of one setup, and who runs a call: `Crew` gives each call its own process, `SharedCrew` lets
async calls share an event loop.

A call in a crew of its own can only harm itself: at its time limit its process is killed, and nobody else was
in it. So that neither calls that wait (on a server, on a child) nor calls that hang keep others from running,
a crew grows while calls queue:

    a worker is in the way    its call has just begun, or computes and has not done so for long
    it is out of the way      its call waits, or has computed for HOG seconds
    start workers             when fewer than `workers` are in the way: GROWTH times as many as are out of the
                              way, `max_workers` in all
    slow a worker down        when its call has computed for a quarter of its time: to the lowest priority
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Self

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.workers.fork_server import ForkServer, Worker, WorkerLost
from laminar_hpc.environments.workers.protocol import Call, CallResult

LOOK_SECONDS = 0.02  # between two looks at the queue
GROWTH = 3
# A call that computes for longer makes way: the sooner, the less others wait.
MAX_HOG_SECONDS, HOG_SHARE_OF_LIMIT = 0.5, 0.05
SLOW_SHARE_OF_LIMIT, LOWEST_PRIORITY = 0.25, 19
IDLE_SECONDS = 60.0  # workers that the crew has grown by leave after it
# An event loop that is silent for so long, whichever is longer, is stuck.
FROZEN_SECONDS, FROZEN_SHARE_OF_LIMIT = 1.0, 0.2
# A shared worker ends its calls itself; this is for its word of it, beyond their limit.
WORD_SECONDS = 30.0


class _Crew:
    """What both kinds have: a server that forks for them, and tasks that end with them."""

    def __init__(self, server: ForkServer, workers: int, limit: float) -> None:
        self._server = server
        self._number = workers
        self._limit = limit
        self._tasks: set[asyncio.Task] = set()
        self._closed = False

    def _spawn(self, coroutine: Coroutine) -> asyncio.Task:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, workers: Iterable[Worker]) -> None:
        """Calls in flight are lost."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in workers:
            worker.kill()


class Crew(_Crew):
    """Processes that each run one call at a time."""

    def __init__(self, server: ForkServer, workers: int, max_workers: int, limit: float) -> None:
        super().__init__(server, workers, limit)
        self._max_workers = max(workers, max_workers)
        self._hog = min(MAX_HOG_SECONDS, HOG_SHARE_OF_LIMIT * limit)
        self._idle: deque[tuple[float, Worker]] = deque()  # since when; the newest at the end
        self._busy: set[Worker] = set()
        self._starting = 0
        self._wishes: deque[asyncio.Future[Worker]] = deque()
        self._looking: asyncio.Task | None = None

    async def start(self) -> None:
        for worker in await asyncio.gather(*(self._server.fork(False) for _ in range(self._number))):
            self._put(worker)

    async def run(self, call: Call) -> CallResult:
        """What came of the call, which ends at the time limit. Raises WorkerLost if its process died."""
        worker = await self._take()
        t0 = time.time()
        worker.began = time.monotonic()
        answered = False
        try:
            result = await worker.ask(call, self._limit)
            answered = True
            return result
        except TimeoutError:
            return CallResult(
                call.id, 0.0, {}, t0, time.time(), f"no result within {self._limit:g} s", "time"
            )
        finally:
            self._busy.discard(worker)
            if answered and (not worker.slowed or _restore(worker)):
                self._put(worker)
            else:
                self._dismiss(worker)

    async def stop(self) -> None:
        """Calls that still wait are lost."""
        self._closed = True
        self._refuse(WorkerLost())
        await self._end([*self._busy, *(worker for _, worker in self._idle)])
        self._busy.clear()
        self._idle.clear()

    # ---- who is free ---------------------------------------------------------------------------------------

    async def _take(self) -> Worker:
        while self._idle and self._idle[-1][1].retired:  # it died while it had nothing to do
            self._dismiss(self._idle.pop()[1])
        if self._closed:
            raise WorkerLost
        if self._idle:
            worker = self._idle.pop()[1]
        else:
            wish = asyncio.get_running_loop().create_future()
            self._wishes.append(wish)
            if self._looking is None or self._looking.done():
                self._looking = self._spawn(self._look())
            try:
                worker = await wish
            except asyncio.CancelledError:
                if wish.done() and not wish.cancelled():
                    self._put(wish.result())
                raise
        self._busy.add(worker)
        return worker

    def _put(self, worker: Worker) -> None:
        """A worker without a call."""
        if worker.retired:
            return self._dismiss(worker)
        while self._wishes:
            wish = self._wishes.popleft()
            if not wish.done():
                wish.set_result(worker)
                return None
        self._idle.append((time.monotonic(), worker))
        while len(self._idle) > self._number and self._idle[0][0] < time.monotonic() - IDLE_SECONDS:
            self._dismiss(self._idle.popleft()[1])
        return None

    def _dismiss(self, worker: Worker) -> None:
        worker.kill()
        self._spawn(self._server.reap(worker))

    # ---- growing -------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """While calls queue."""
        while self._wishes:
            for _ in range(self._missing()):
                self._starting += 1
                self._spawn(self._add())
            await asyncio.sleep(LOOK_SECONDS)

    def _missing(self) -> int:
        """Workers to be started now."""
        now = time.monotonic()
        in_the_way = sum(self._is_in_the_way(worker, now) for worker in self._busy) + self._starting
        if in_the_way >= self._number:
            return 0
        present = len(self._busy) + len(self._idle) + self._starting
        wanted = max(self._number - in_the_way, GROWTH * (len(self._busy) + self._starting - in_the_way))
        return max(
            0, min(wanted, self._max_workers - present, len(self._wishes) - len(self._idle) - self._starting)
        )

    def _is_in_the_way(self, worker: Worker, now: float) -> bool:
        taken = now - worker.began
        if taken > SLOW_SHARE_OF_LIMIT * self._limit and not worker.slowed and computes(worker.pid):
            worker.slowed = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, worker.pid, LOWEST_PRIORITY)
        return taken < LOOK_SECONDS or (taken <= self._hog and computes(worker.pid))

    async def _add(self) -> None:
        try:
            self._put(await self._server.fork(False))
        except LaminarError as error:
            self._refuse(error)
        finally:
            self._starting -= 1

    def _refuse(self, error: Exception) -> None:
        """To all that wait for a worker."""
        for wish in self._wishes:
            if not wish.done():
                wish.set_exception(error)
        self._wishes.clear()


def _restore(worker: Worker) -> bool:
    """Back to our own priority; few may do that, and where it fails the process is no longer of use."""
    try:
        os.setpriority(os.PRIO_PGRP, worker.pid, os.getpriority(os.PRIO_PROCESS, 0))
        worker.slowed = False
    except OSError:
        return False
    return True


def computes(pid: int) -> bool:
    """Whether the process is running or waits for nothing but a CPU."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"R"
    except OSError:
        return False


class SharedCrew(_Crew):
    """Processes that run many async calls on one event loop. A stuck loop is given up with all its calls."""

    def __init__(self, server: ForkServer, workers: int, limit: float) -> None:
        super().__init__(server, workers, limit)
        self._patience = max(FROZEN_SECONDS, FROZEN_SHARE_OF_LIMIT * limit)
        self._workers: list[Worker] = []
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        await asyncio.gather(*(self._add() for _ in range(self._number)))

    async def run(self, call: Call) -> CallResult:
        """Raises WorkerLost when the process died, its loop was stuck, or nothing was said of the call: it
        may have been another call's fault."""
        try:
            return await (await self.worker()).ask(call, self._limit + WORD_SECONDS)
        except TimeoutError:
            raise WorkerLost from None

    async def worker(self) -> Worker:
        """The one with the fewest calls. Raises WorkerLost after `stop`."""
        async with self._changing:
            while len(able := [worker for worker in self._workers if not worker.retired]) < self._number:
                if self._closed:
                    raise WorkerLost
                await self._add()
        return min(able, key=lambda worker: len(worker.calls))

    async def _add(self) -> None:
        worker = await self._server.fork(True)
        self._workers.append(worker)
        self._spawn(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        """Gives it up when it has been silent through four looks of ours: a loop of ours that is late looks
        less often. A program is never silent for too long."""
        look = None if self._server.setup.program else self._patience / 4
        silent = 0
        seen = worker.frames
        while silent < 4 and not worker.retired:
            await asyncio.wait([worker.listener], timeout=look)
            silent = silent + 1 if worker.frames == seen else 0
            seen = worker.frames
        self._workers.remove(worker)
        await self._server.reap(worker)

    async def stop(self) -> None:
        """Calls in flight are lost."""
        await self._end(self._workers)
        self._workers.clear()


class WorkerPool:
    """The workers of one fork server, of rewards and environments: `start` and `close`, or a context."""

    _has_calls = True  # else plain functions have a process with each session, and none before

    def __init__(self, server: ForkServer, workers: int, max_workers: int, limit: float) -> None:
        self._server = server
        self._crew = Crew(server, workers, max_workers, limit)
        self._shared = SharedCrew(server, workers, limit)
        self._ids = itertools.count(1)

    async def start(self) -> None:
        """Raises LaminarError for a function that is not there, or cannot be called."""
        try:
            await self._server.start()
            shared = len(self._server.ready.asynchronous)
            plain = len(self._server.ready.tools) - shared
            crews = [self._shared] * bool(shared) + [self._crew] * bool(plain and self._has_calls)
            await asyncio.gather(*(crew.start() for crew in crews))
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _crew_of(self, call: Call) -> "Crew | SharedCrew":
        return self._shared if call.name in self._server.ready.asynchronous else self._crew

    async def close(self) -> None:
        """Ends all workers, also those with calls in flight."""
        await asyncio.gather(self._crew.stop(), self._shared.stop())
        await self._server.stop()
