"""Which of some processes live, looked at while they end, and what they cost; a free port; and a thread with
an event loop."""

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import psutil


def free_port() -> int:
    """Of loopback, at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def children_seconds() -> float:
    """Of a processor, that this process's children have had until their end: the same on a busy machine."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def found(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that are there."""
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are there and have not ended: a zombie has."""
    alive = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def ended(processes: Iterable[psutil.Process], seconds: float = 5.0) -> bool:
    """Whether all of them end within `seconds`."""
    deadline = time.monotonic() + seconds
    while living(processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class LoopThread:
    """An event loop in a thread, so that plain tests can use one engine one after the other."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine, seconds: float = 120.0) -> Any:
        return self.start(coroutine).result(seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
