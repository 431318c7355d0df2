"""A thread that waits for gloo, which cannot be woken, in another one's place. Used by links.py."""

import queue
import threading
from datetime import timedelta

import torch.distributed as dist


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
