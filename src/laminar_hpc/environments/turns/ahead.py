"""Sessions whose reset begins before anybody asks for them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from laminar_hpc.environments.turns.session import EnvironmentFailed, Session


class Ahead:
    """`begin(row)` resets one. At most `most` are kept. A session is of its row alone: whichever trajectory
    has that row may have it."""

    def __init__(self, begin: Callable[[dict], Coroutine[Any, Any, Session]], most: int) -> None:
        self._begin = begin
        self._most = most
        self._begun: list[tuple[dict, asyncio.Task[Session]]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def expect(self, rows: Sequence[tuple[dict, int]]) -> None:
        """So many of each. Those of other rows are closed."""
        wanted = [row for row, count in rows for _ in range(count)][: self._most]
        before = self._begun
        self._begun = []
        for row in wanted:
            at = _place(before, row)
            self._begun.append((row, asyncio.create_task(self._begin(row))) if at is None else before.pop(at))
        for _, task in before:
            self._let_go(task)

    async def take(self, row: dict) -> Session | None:
        """One whose reset for this row has returned; waits for it. None if there is none or it failed."""
        if (at := _place(self._begun, row)) is None:
            return None
        _, task = self._begun.pop(at)
        try:
            return await task
        except EnvironmentFailed:
            return None
        except asyncio.CancelledError:
            self._let_go(task)  # it may have returned in the same moment
            raise

    async def close(self) -> None:
        """Ends all that nobody has asked for."""
        for _, task in self._begun:
            self._let_go(task)
        self._begun = []
        await asyncio.gather(*self._closing)

    def _let_go(self, task: asyncio.Task[Session]) -> None:
        async def end() -> None:
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(ended, Session):
                ended.close()

        closing = asyncio.create_task(end())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _place(begun: Sequence[tuple[dict, asyncio.Task[Session]]], row: dict) -> int | None:
    return next((at for at, (known, _) in enumerate(begun) if known == row), None)
