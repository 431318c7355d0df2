"""Time limits of waits for another process, in this process's own time: seconds in which its event loop did
not turn (it was stopped, a call held the loop, the machine stood still) count against nobody, and when a
limit has passed the loop turns once more, so that an answer that lies in a socket is found.

Imports nothing of other packages: reward workers run under other interpreters, too.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator

_TICK = 0.05  # seconds; a limit is met one to two of them late


class _Clock:
    """Measures one event loop's own time, from its first use to the loop's end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ends: dict[asyncio.Timeout, float] = {}
        self._stood = 0.0
        self._over = set[asyncio.Timeout]()
        self._due = loop.time() + _TICK
        loop.call_at(self._due, self._tick)

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._stood

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if (late := loop.time() - self._due) > _TICK:
            self._stood += late
        for timeout in self._over:
            if self.ends.pop(timeout, None) is not None:
                timeout.reschedule(loop.time())
        now = self.now()
        self._over = {timeout for timeout, end in self.ends.items() if end <= now}
        self._due = loop.time() + _TICK
        loop.call_at(self._due, self._tick)


_clocks = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Clock]()


def _clock() -> _Clock:
    loop = asyncio.get_running_loop()
    if (clock := _clocks.get(loop)) is None:
        clock = _clocks[loop] = _Clock(loop)
    return clock


def own_time() -> float:
    """Seconds, as time.monotonic(), less those in which the running loop stood still."""
    return _clock().now()


@contextlib.asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """As asyncio.timeout, around a wait for another process; None is no limit. Raises TimeoutError."""
    clock = _clock()
    async with asyncio.timeout(None) as timeout:
        if seconds is not None:
            clock.ends[timeout] = clock.now() + seconds
        try:
            yield
        finally:
            clock.ends.pop(timeout, None)
