"""The event loop of a replica: with a thousand connections that have something to say at once, each of its
turns takes a few of them, so that whatever else runs in it comes between."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_AT_ONCE = 32  # of 256 KiB at most each, which takes some milliseconds
T = TypeVar("T")
Ready = list[tuple[selectors.SelectorKey, int]]


class FewAtOnce(selectors.DefaultSelector):
    """Gives at most _AT_ONCE of what is ready, all of it by turns."""

    _next = 0

    def select(self, timeout: float | None = None) -> Ready:
        """Selects as any selector does."""
        ready: Ready = super().select(timeout)
        if len(ready) <= _AT_ONCE:
            return ready
        begin = self._next % len(ready)
        self._next = begin + _AT_ONCE
        return (ready + ready)[begin : begin + _AT_ONCE]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as asyncio.run does."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FewAtOnce())) as runner:
        return runner.run(main)
