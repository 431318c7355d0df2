"""Sessions that are reset before anybody asks for them: each is given once, to its row, and none is left."""

import asyncio

import pytest

from laminar_hpc.environments.turns.ahead import Ahead
from laminar_hpc.environments.turns.session import EnvironmentFailed, Session

A, B, C = {"q": "a"}, {"q": "b"}, {"q": "c"}


class Resets:
    """Each waits until the test lets it return."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.closed: list[str] = []
        self.fail = False
        self.go = asyncio.Event()

    async def __call__(self, row: dict) -> Session:
        name = f"{row['q']}{self.begun.count(row['q'])}"
        self.begun.append(row["q"])
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.closed.append(name)
            raise
        if self.fail:
            raise EnvironmentFailed("reset")

        async def ask(call: object) -> None: ...

        session = Session(name, 0, ask, lambda: self.closed.append(name))  # type: ignore[arg-type]
        session.observation = name
        return session


async def names(ahead: Ahead, *rows: dict) -> list[str | None]:
    found = [await ahead.take(row) for row in rows]
    return [session.observation if session else None for session in found]


async def test_each_is_given_once() -> None:
    """To whoever has its row, also while it is still being reset."""
    resets = Resets()
    ahead = Ahead(resets.__call__, 10)
    ahead.expect([(A, 2), (B, 1)])
    taking = asyncio.create_task(ahead.take(dict(A)))
    await asyncio.sleep(0)
    resets.go.set()
    first = await taking
    assert first is not None and first.observation == "a0"
    assert await names(ahead, B, A, A, C) == ["b0", "a1", None, None]
    await ahead.close()
    assert resets.begun == ["a", "a", "b"] and not resets.closed


async def test_what_nobody_wants_any_more_is_closed() -> None:
    """Whether it is reset by then or not; what is wanted still is not begun again, and there is a bound."""
    resets = Resets()
    ahead = Ahead(resets.__call__, 3)
    resets.go.set()
    ahead.expect([(A, 1), (B, 1)])
    kept = await ahead.take(B)
    assert kept is not None and kept.observation == "b0"
    ahead.expect([(A, 1), (B, 1)])
    await asyncio.sleep(0)
    resets.go.clear()
    ahead.expect([(A, 1), (C, 9)])
    await asyncio.sleep(0)
    assert resets.begun == ["a", "b", "b", "c", "c"]
    await ahead.close()
    assert sorted(resets.closed) == ["a0", "b1", "c0", "c1"]


async def test_one_that_fails_is_reset_anew() -> None:
    """By whoever asks: that is its first try."""
    resets = Resets()
    resets.fail = True
    ahead = Ahead(resets.__call__, 3)
    ahead.expect([(A, 1)])
    resets.go.set()
    assert await names(ahead, A, A) == [None, None]
    await ahead.close()


async def test_whoever_waits_for_one_may_go() -> None:
    """The reset ends with it."""
    resets = Resets()
    ahead = Ahead(resets.__call__, 3)
    ahead.expect([(A, 1)])
    taking = asyncio.create_task(ahead.take(A))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert resets.closed == ["a0"] and await ahead.take(A) is None
    await ahead.close()


async def test_whoever_waits_for_one_goes_as_it_returns() -> None:
    """Nobody has it then: it is closed."""
    resets = Resets()
    ahead = Ahead(resets.__call__, 3)
    ahead.expect([(A, 1)])
    [(_, reset)] = ahead._begun
    taking = asyncio.create_task(ahead.take(A))
    reset.add_done_callback(lambda _: taking.cancel())  # before whoever waits for it hears of it
    await asyncio.sleep(0)
    resets.go.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await ahead.close()
    assert resets.closed == ["a0"]
