"""Threads that wait for gloo, which cannot be woken, in another one's place. Used by links.py, and by those
who make links."""

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

from laminar_hpc.weights.links.meeting import LinkBroken

_LOOK_SECONDS = 0.1  # between two looks at whether a link is still wanted


class Waiter:
    """A thread that waits in another one's place, which can leave it behind."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[dist.Work, timedelta] | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._error: Exception | None = None  # that ended a wait: there is none after it
        threading.Thread(target=self._run, name="link-wait", daemon=True).start()

    def _run(self) -> None:
        while (asked := self._works.get()) is not None:
            work, limit = asked
            try:
                work.wait(limit)
                self._ends.put(None)
            except Exception as error:
                self._ends.put(error)

    def wait(self, work: dist.Work, limit: timedelta) -> None:
        """As `work.wait(limit)`. Raises RuntimeError once `leave` was called."""
        if self._error is None:
            self._works.put((work, limit))
            self._error = self._ends.get()
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        self._ends.put(RuntimeError("it was closed"))
        self._works.put(None)


class Closable(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=Closable)


def made_unless(given_up: Callable[[], bool], make: Callable[[], Made]) -> Made:
    """What `make()` returns or raises; LinkBroken as soon as `given_up()` holds. Gloo's attempt cannot be
    called off: it ends by itself, on a thread of its own, and what it makes is closed."""
    results: queue.SimpleQueue[Made | Exception] = queue.SimpleQueue()
    late = threading.Event()

    def run() -> None:
        try:
            results.put(link := make())
            if late.is_set():
                link.close()
        except Exception as error:
            results.put(error)

    threading.Thread(target=run, name="link-make", daemon=True).start()
    while True:
        try:
            result = results.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            if not given_up():
                continue
            late.set()
            with contextlib.suppress(queue.Empty):
                if not isinstance(made := results.get_nowait(), Exception):
                    made.close()
            raise LinkBroken("another link takes its place") from None
        if isinstance(result, Exception):
            raise result
        return result
