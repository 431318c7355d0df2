"""The same asked twice, where the first answer is late: for what may be done twice."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from laminar_hpc.machine.own_time import within

T = TypeVar("T")


async def first_of(
    begin: Callable[[], Coroutine[Any, Any, T]], late: float | None, undo: Callable[[T], None]
) -> T:
    """What `begin()` returns; after `late` seconds it is begun a second time, and the first that returns
    counts. The other is cancelled, or undone where it has returned too. Raises what the first raises before
    it is late, and after that what the second raises. None is never late."""

    def put_back(lost: asyncio.Task[T]) -> None:
        if _returned(lost):
            undo(lost.result())

    tasks = [asyncio.create_task(begin())]
    won: asyncio.Task[T] | None = None
    try:
        with contextlib.suppress(TimeoutError):
            async with within(late):
                await asyncio.wait(tasks)
        if not tasks[0].done():
            tasks.append(asyncio.create_task(begin()))
        pending = set(tasks)
        while won is None and pending:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            won = next((task for task in tasks if _returned(task)), None)
        return (won or tasks[-1]).result()
    finally:
        for task in tasks:  # not awaited: who is cancelled meanwhile would lose what has won
            if task is not won:
                task.cancel()
                task.add_done_callback(put_back)


def _returned(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
