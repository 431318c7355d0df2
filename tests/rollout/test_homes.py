"""docs/promises.md#stays: an environment stays at its replica while its trajectory moves: it is called
once for each question, closed once, and is there when the trajectory comes back."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from helpers.engines.said import Line
from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.turns.episode import Episode
from laminar_hpc.environments.turns.session import EnvironmentFailed, Session
from laminar_hpc.environments.workers.protocol import Call, CallResult
from laminar_hpc.line.messages.data import Partial, PromptGroup
from laminar_hpc.line.messages.homes import Ask, LetGo, replica_of
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.rollout.homes import EnvironmentHomes, Home
from laminar_hpc.rollout.in_flight import TrajectoryInFlight

GROUP = PromptGroup(1, [1, 2], "p", {"environment": "shelf"}, [])


class Case:
    """Replica 3 and the environment of trajectory 7. Its calls end when the test says, with one second of
    work, or fail."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.line, self.ends, self.made, self.closed = Line(), asyncio.Event(), list[Ask](), 0
        self.fails = False
        self.homes = EnvironmentHomes(3, self.line, self.make, seconds)  # type: ignore[arg-type]
        self.work = self.another()
        self.work.session = Session("shelf", 1, self.ask, self.close)
        self.homes.begin(self.work)
        self.name = self.work.partial.home

    def another(self, home: str = "") -> TrajectoryInFlight:
        """The trajectory, as a work that has come here."""
        work = TrajectoryInFlight(7, 0, GROUP, 0, 0, 1.0, 100, partial=Partial(home=home))
        work.episode = Episode(EnvironmentConfig(), 1.0)
        return work

    async def ask(self, _: Call) -> CallResult:
        raise AssertionError("nobody calls it here")

    def close(self) -> None:
        self.closed += 1

    async def make(self, home: Home, ask: Ask) -> Answer:
        assert home.row == GROUP.row
        self.made.append(ask)
        await self.ends.wait()
        if self.fails:
            raise EnvironmentFailed("its process ended in look")
        home.episode.worked_seconds += 1.0
        return Answer(7, ask.name, b"\1\0\0\0", 0, 1.0)

    def asked(self, name: str = "3:7:1:9") -> Ask:
        ask = Ask(7, self.name, name, [("look", '{"key": "k"}')], 5)
        self.homes.arrived(ask)
        return ask


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(test())


def test_a_question_is_asked_of_it_once() -> None:
    """However often it comes: while the calls are made, and behind them, when the Answer is said again."""

    async def test() -> None:
        case = Case()
        case.homes.leaves(case.work)
        assert case.homes.for_others and case.work.session is None
        first = case.asked()
        case.asked()
        await settle()
        assert case.made == [first] and not case.line.sent
        case.ends.set()
        await settle()
        case.asked()
        answer = Answer(7, first.name, b"\1\0\0\0", 0, 1.0)
        assert case.line.sent == [answer, answer] and case.made == [first]
        case.asked("3:7:1:30")
        await settle()
        assert len(case.made) == 2 and not case.closed

    run(test)


def test_calls_that_began_before_it_left() -> None:
    """Are not made again for who asks after them; what they came to is said when it is known, and counts as
    the environment's work."""

    async def test() -> None:
        case = Case()
        case.homes.calls(case.work, "3:7:0:9")
        case.homes.leaves(case.work)
        case.asked("3:7:0:9")
        await settle()
        assert not case.made and not case.line.sent
        answer = Answer(7, "3:7:0:9", b"\1\0\0\0", 0, 2.0)
        case.homes.calls(case.work, "3:7:0:9", answer)
        case.asked("3:7:0:9")
        assert case.line.sent == [answer] and not case.made
        home = case.homes.take(case.name)
        assert home is not None and home.episode.worked_seconds == 2.0

    run(test)


def test_it_comes_back() -> None:
    """To the environment that it left, whose time goes on. What then leaves late changes nothing."""

    async def test() -> None:
        case = Case()
        assert case.work.episode is not None
        case.work.episode.reset(5.0, 0.5)
        session = case.work.session
        case.homes.leaves(case.work)
        back = case.another(case.name)
        assert case.homes.back(back) and back.session is session and not case.homes.for_others
        assert back.episode is not None and (back.episode.opened, back.episode.worked_seconds) == (5.0, 0.5)
        case.homes.leaves(case.work)
        assert not case.homes.for_others
        assert not case.homes.back(case.another("3:7:0:99")), "another's environment"

    run(test)


def test_it_fails() -> None:
    """Who asked is told that it was the environment, and it is closed, once; later questions are answered
    too."""

    async def test() -> None:
        case = Case()
        case.homes.leaves(case.work)
        case.fails = True
        case.ends.set()
        case.asked()
        await settle()
        error = "its process ended in look"
        assert case.line.sent == [Answer(7, "3:7:1:9", error=error, failed_environment=True)]
        assert case.closed == 1 and not case.homes.for_others
        case.homes.arrived(LetGo(case.name))
        case.asked("3:7:1:30")
        assert case.closed == 1 and "not at replica 3" in str(case.line.sent[-1])

    run(test)


def test_calls_that_fail_when_it_has_left() -> None:
    """Nobody else closes its environment; while it is here, its episode does."""

    async def test() -> None:
        case = Case()
        case.homes.failed(case.work)
        assert not case.closed
        case.homes.leaves(case.work)
        case.homes.failed(case.work)
        assert case.closed == 1 and not case.homes.for_others

    run(test)


@pytest.mark.parametrize("old", [True, False])
def test_it_is_let_go(old: bool) -> None:
    """By the controller, or by nobody for as long as a trajectory may take."""

    async def test() -> None:
        case = Case(seconds=-1.0 if old else 60.0)
        case.homes.leaves(case.work)
        if not old:
            assert not case.closed
            case.homes.arrived(LetGo(case.name))
        assert case.closed == 1 and not case.homes.for_others
        await case.homes.close()

    run(test)


def test_the_replica_in_a_name() -> None:
    """Of an environment's and of an Answer's; what is no such name is no replica's."""
    assert replica_of("12:7:0:3") == 12
    assert [replica_of(name) for name in ("", "x:1", "-1:2", "²:1", "1" * 40)] == [-1] * 5
