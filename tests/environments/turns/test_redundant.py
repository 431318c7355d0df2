"""What is asked twice where the first answer is late: exactly one answer counts, the other is undone."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from laminar_hpc.environments.turns.redundant import first_of


class Asked:
    """Each that is begun returns, or raises, when the test says so."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[str]] = []
        self.undone: list[str] = []

    async def __call__(self) -> str:
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    async def begun(self, count: int) -> None:
        while len(self.answers) < count:
            await asyncio.sleep(0)


def started(asked: Asked, late: float | None) -> asyncio.Task[str]:
    begin: Callable[[], Coroutine[None, None, str]] = asked.__call__
    return asyncio.create_task(first_of(begin, late, asked.undone.append))


@pytest.mark.parametrize("winner", [0, 1])
async def test_the_first_that_returns_counts(winner: int) -> None:
    """Whichever it is; the other is cancelled."""
    asked = Asked()
    task = started(asked, 0.0)
    await asked.begun(2)
    asked.answers[winner].set_result("won")
    assert await task == "won" and asked.answers[1 - winner].cancelled() and not asked.undone


async def test_both_at_once() -> None:
    """One counts, the other is undone."""
    asked = Asked()
    task = started(asked, 0.0)
    await asked.begun(2)
    for number, answer in enumerate(asked.answers):
        answer.set_result(str(number))
    assert sorted([await task, *asked.undone]) == ["0", "1"]


async def test_what_is_raised() -> None:
    """Before it is late by the first, at once; after that there is another to wait for, and where both raise
    the second's is told."""
    asked = Asked()
    task = started(asked, None)
    await asked.begun(1)
    asked.answers[0].set_exception(ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        await task
    assert len(asked.answers) == 1

    asked = Asked()
    task = started(asked, 0.0)
    await asked.begun(2)
    asked.answers[0].set_exception(ValueError("first"))
    await asyncio.sleep(0)
    asked.answers[1].set_result("second")
    assert await task == "second"

    asked = Asked()
    task = started(asked, 0.0)
    await asked.begun(2)
    asked.answers[1].set_exception(ValueError("second"))
    asked.answers[0].set_exception(ValueError("first"))
    with pytest.raises(ValueError, match="second"):
        await task


async def test_whoever_asks_is_cancelled() -> None:
    """Nothing goes on behind it."""
    asked = Asked()
    task = started(asked, 0.0)
    await asked.begun(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(answer.cancelled() for answer in asked.answers)


async def test_whoever_asks_is_cancelled_as_one_returns() -> None:
    """Nobody has it then: it is undone, also while the other, which was cancelled, takes its time to end."""
    asked, ended = Asked(), asyncio.Event()

    async def lingering() -> str:
        try:
            return await asked()
        except asyncio.CancelledError:
            await ended.wait()
            raise

    given: list[str] = []

    async def asks() -> None:
        given.append(await first_of(lingering, 0.0, asked.undone.append))

    task = asyncio.create_task(asks())
    await asked.begun(2)
    asked.answers[0].set_result("won")
    while not asked.answers[1].cancelled():
        await asyncio.sleep(0)
    task.cancel()
    ended.set()
    await asyncio.gather(task, return_exceptions=True)
    assert [*given, *asked.undone] == ["won"]
