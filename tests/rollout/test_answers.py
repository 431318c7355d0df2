"""docs/promises.md#one-call: a trajectory moves while it waits for its tool, and what its calls come to
follows it: each is made once, and nobody waits for ever."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from helpers.engines.said import Line
from laminar_hpc.line.messages.data import Partial, PromptGroup
from laminar_hpc.line.messages.moves import Answer, MoveOrder
from laminar_hpc.rollout import answers
from laminar_hpc.rollout.answers import CallAnswers, TrajectoryEnded, name_of
from laminar_hpc.rollout.in_flight import Outcome, State, TrajectoryInFlight

NAME = name_of(3, 7, 0, 5)
ANSWER = Answer(7, NAME, b"\1\0\0\0", 1, 0.5)


class Case:
    """One trajectory that waits, its calls, which end when the test says, and its moves, which the test
    decides."""

    def __init__(self, awaits: str = "") -> None:
        self.line, self.ends, self.begun, self.cancelled = Line(), asyncio.Event(), 0, 0
        self.answers = CallAnswers(self.line, self._hand_over)  # type: ignore[arg-type]
        group = PromptGroup(1, [1, 2], "p", {}, [])
        partial = Partial(called=bool(awaits), awaits=awaits)
        self.work = TrajectoryInFlight(7, 0, group, 0, 0, 1.0, 100, partial=partial)
        self.moves: asyncio.Queue[bool] = asyncio.Queue()
        self.offered: list[str] = []

    async def _hand_over(self, work: TrajectoryInFlight) -> bool:
        self.offered.append(work.partial.awaits)
        return await self.moves.get()

    async def calls(self) -> Answer:
        self.begun += 1
        try:
            await self.ends.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return ANSWER

    def here(self) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.answers.made_here(self.work, NAME, self.calls()))

    def elsewhere(self, seconds: float = 60.0) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.answers.made_elsewhere(self.work, seconds))

    def waits(self) -> bool:
        return self.work.state is State.WAITING

    def order(self) -> None:
        self.work.leave(MoveOrder("m", 7, 0, ""))


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0)


async def ended(task: Awaitable[Answer]) -> Outcome:
    with pytest.raises(TrajectoryEnded) as caught:
        await task
    return caught.value.outcome


def run(test: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(test())


def test_it_moves_and_the_answer_follows() -> None:
    """The calls go on where they are made, once; their Answer goes out when they end, and the replica is
    settled only then."""

    async def test() -> None:
        case = Case()
        task = case.here()
        await until(case.waits)
        case.order()
        case.moves.put_nowait(True)
        assert (await ended(task)).moved_away and case.offered == [NAME]
        settled = asyncio.create_task(case.answers.settled())
        await asyncio.sleep(0)
        assert not settled.done() and not case.line.sent and not case.waits()
        case.ends.set()
        await settled
        assert case.line.sent == [ANSWER] and (case.begun, case.cancelled) == (1, 0)

    run(test)


def test_a_move_that_is_off_changes_nothing() -> None:
    """Also when the calls have ended meanwhile."""

    async def test() -> None:
        case = Case()
        task = case.here()
        await until(case.waits)
        for _ in range(2):
            case.order()
            case.moves.put_nowait(False)
            await until(lambda: case.work.move is None)
        case.order()
        await until(lambda: len(case.offered) == 3)
        case.ends.set()
        case.moves.put_nowait(False)
        assert await task == ANSWER and case.work.move is None and case.work.partial.awaits == ""
        assert not case.line.sent and case.work.state is State.GENERATING

    run(test)


@pytest.mark.parametrize("early", [True, False])
def test_the_answer_of_another_replica(early: bool) -> None:
    """Whether it comes before its trajectory or behind it."""

    async def test() -> None:
        case = Case(NAME)
        if early:
            case.answers.arrived(ANSWER)
        task = case.elsewhere()
        if not early:
            await until(case.waits)
            case.answers.arrived(ANSWER)
        assert await task == ANSWER and not case.answers._heard

    run(test)


@pytest.mark.parametrize("told", [True, False])
def test_it_moves_again(told: bool) -> None:
    """What was told here while the trajectory left is told again, and so goes on to where that is; what was
    not goes there by itself."""

    async def test() -> None:
        case = Case(NAME)
        task = case.elsewhere()
        await until(case.waits)
        case.order()
        await until(lambda: case.offered)
        if told:
            case.answers.arrived(ANSWER)
        case.moves.put_nowait(True)
        assert (await ended(task)).moved_away
        await case.answers.settled()
        assert case.line.sent == ([ANSWER] if told else [])

    run(test)


def test_waits_that_come_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer in time, one that says that there is none, and a trajectory that others have by now: its
    calls are ended."""
    monkeypatch.setattr(answers, "WAY_SECONDS", 0.0)

    async def test() -> None:
        assert "nobody has said within 0.05 s" in str((await ended(Case(NAME).elsewhere(0.05))).lost)
        case = Case(NAME)
        case.answers.arrived(Answer(7, NAME, error="replica 3 was lost"))
        assert (await ended(case.elsewhere())).lost == "replica 3 was lost"
        case = Case()
        task = case.here()
        await until(lambda: case.begun)
        case.work.drop()
        assert (await ended(task)).moved_away
        await until(lambda: case.cancelled)
        assert not case.line.sent

    run(test)


def test_what_nobody_asks_for_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest CallAnswers are forgotten; calls that others still wait for end with the replica."""
    monkeypatch.setattr(answers, "_REMEMBERED", 2)

    async def test() -> None:
        case = Case()
        for number in range(5):
            case.answers.arrived(Answer(7, name_of(3, 7, number, 5)))
        assert list(case.answers._heard) == [name_of(3, 7, number, 5) for number in (3, 4)]
        task = case.here()
        await until(case.waits)
        case.order()
        case.moves.put_nowait(True)
        await ended(task)
        await case.answers.close()
        await until(lambda: case.cancelled)

    run(test)


@pytest.mark.parametrize("bound", [False, True])
def test_its_engine_fails(bound: bool) -> None:
    """Its calls go on for whoever gets the trajectory, and their Answer waits until it is handed over. Of one
    that is bound to its environment here they are ended."""

    async def test() -> None:
        case = Case()
        case.work.bound = bound
        task = case.here()
        await until(lambda: case.begun)
        case.work.strand()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert case.answers.made_for_others != bound == bool(case.cancelled)
        assert case.work.partial.awaits == ("" if bound else NAME)
        if not bound:
            case.ends.set()
            await asyncio.sleep(0)
            assert not case.line.sent
            case.answers.go_on()
            await case.answers.settled()
            assert case.line.sent == [ANSWER]

    run(test)
