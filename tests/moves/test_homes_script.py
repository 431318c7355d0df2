"""docs/promises.md#stays at the controller, message by message: questions reach the replica that has the
environment, which grades what has ended elsewhere and is let go once; with its loss the trajectory begins
again."""

from pathlib import Path

import pytest

from helpers.control.script import samples_of
from helpers.control.three import Three
from helpers.made import Made, stored
from laminar_hpc.line.messages.data import Partial, ReplicaLoad, VersionSpan
from laminar_hpc.line.messages.homes import Ask, LetGo
from laminar_hpc.line.messages.membership import Ping
from laminar_hpc.line.messages.moves import Answer, Imported
from laminar_hpc.line.messages.rollouts import (
    Generated,
    Increment,
    Leaving,
    Lost,
    RequestWork,
    Scored,
    ScoreOrder,
)
from laminar_hpc.rollout.partial_response import columns

TOKENS = columns([1, 2, 3, 4], [-1.0] * 4)


class Apart(Three):
    """One trajectory has moved from replica 0, where its environment is, to replica 1."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.id = min(samples_of(self.grant))
        self.group = next(g for g in self.grant.groups if self.id in {s.trajectory_id for s in g.samples})
        self.home, self.name = f"0:{self.id}:0:0", f"0:{self.id}:1:4"
        partial = Partial(*TOKENS, [VersionSpan(0, 0, 4)], 1.0, home=self.home)
        assert self.moves(self.id, 0, 0, 1, partial).home == self.home

    def asks(self) -> Ask:
        """Its holder, as a rollout does: what it awaits is known before it asks."""
        empty = columns([], [])
        told = Increment(self.id, 1, 4, *empty, [], 1.0, True, self.name, self.home)
        ask = Ask(self.id, self.home, self.name, [("look", '{"key": "k"}')], 4)
        self.script.hear("rollout", 1, told, ask)
        return ask

    def generates(self) -> Generated:
        group = self.group
        made = Made(self.id, group.group_id, group.prompt_tokens, [1, 2, 3, 4], [-1.0] * 4, attempt=1)
        generated = Generated(
            stored(self.script.run_dir, made), home=self.home, figures={"environment.turns": 2.0}
        )
        self.script.hear("rollout", 1, generated)
        return generated

    def known(self) -> Partial | None:
        return self.script.known(self.id, 1)

    @property
    def begins_again(self) -> bool:
        """Nobody has it."""
        return self.id in self.script.open_of(self.group.group_id)


@pytest.fixture
def apart(tmp_path: Path) -> Apart:
    return Apart(tmp_path)


def test_questions_and_answers_find_their_way(apart: Apart) -> None:
    """To the environment, and to whoever has the trajectory: also another one, to which it was rescued."""
    ask = apart.asks()
    assert apart.sent(0, Ask) == [ask] and not apart.sent(1, Answer)
    apart.script.dies(1)
    failover, reserve, partial = apart.take(apart.id, (0, 2))
    assert (partial.home, partial.awaits) == (apart.home, apart.name)
    apart.script.hear("rollout", failover, Imported(reserve.move_id, 0))
    answer = Answer(apart.id, apart.name, b"\5\0\0\0")
    apart.script.hear("rollout", 0, answer)
    assert apart.sent(failover, Answer) == [answer] and not apart.sent(0, LetGo)


def test_it_grades_what_has_ended_elsewhere(apart: Apart) -> None:
    """It gets the order with the figures, before it is let go; its score counts."""
    generated = apart.generates()
    (order,) = apart.script.ordered(0)
    assert (order.home, order.figures, order.attempt) == (apart.home, generated.figures, 1)
    assert [m.home for m in apart.sent(0, LetGo)] == [apart.home]
    assert apart.script.scoring(0) == [apart.id]
    apart.script.hear("rollout", 0, Scored(apart.id, 1, 1.0, {}, "", 3.0))
    assert not apart.script.scoring(0)


def test_the_grader_is_lost(apart: Apart) -> None:
    """Before the trajectory has ended, or while it grades: the trajectory is generated again."""
    apart.generates()
    apart.script.dies(0)
    apart.script.hear("rollout", 2, RequestWork(0))
    orders = apart.script.ordered(1) + apart.script.ordered(2)
    (order,) = [order for order in orders if order.trajectory_id == apart.id]
    assert not order.home, "whoever is asked has no such environment, and says so"
    apart.script.hear("rollout", 2, Lost(apart.id, 1, "its environment has ended with its replica"))
    assert apart.begins_again


def test_it_ends_when_its_grader_is_gone(apart: Apart) -> None:
    apart.script.dies(0)
    apart.generates()
    assert not apart.sent(0, ScoreOrder) and apart.begins_again


@pytest.mark.parametrize("leaves", [False, True])
def test_the_environment_is_lost(apart: Apart, leaves: bool) -> None:
    """With its replica, or that is about to end: who waits is told, who asks is told, and what is known of
    the trajectory is forgotten, so that it begins again."""
    apart.asks()
    apart.script.hear("rollout", 0, Leaving()) if leaves else apart.script.dies(0)
    (told,) = apart.sent(1, Answer)
    assert told.name == apart.name and "replica 0 was lost with its environment" in told.error
    assert apart.known() is None and not apart.sent(0, LetGo)
    questions = len(apart.sent(0, Ask))
    apart.script.hear("rollout", 1, Ask(apart.id, apart.home, "0:1:1:9", [], 4))
    assert "was lost" in apart.sent(1, Answer)[-1].error and len(apart.sent(0, Ask)) == questions


def test_the_environment_is_lost_while_nobody_has_its_trajectory(apart: Apart) -> None:
    """Its holder has died too, and nobody has room: it begins again with whoever asks next, and is not held
    for ever."""
    full = ReplicaLoad("draining", 0, 4, 0, kv_capacity=10_000, kv_tokens=10_000)
    apart.script.hear("rollout", 2, Ping(full))
    apart.script.hear("rollout", 0, Ping(full))
    apart.script.dies(1)
    assert apart.known() is not None and apart.script.owner(apart.id) == (None, 1)
    apart.script.dies(0)
    assert apart.known() is None
    apart.script.granted(2)
    apart.script.asks(2, 0, apart.script.newest_batch(2))
    again = apart.script.granted(2)
    assert again is not None and samples_of(again)[apart.id] == 2 and apart.id not in again.parts
    assert apart.script.owner(apart.id) == (2, 2)


def test_its_holder_begins_again(apart: Apart) -> None:
    """With an environment of its own: the first is let go, and nothing of the first is left in the pool."""
    again = Increment(apart.id, 1, 0, *columns([9], [0.0]), [], 0.0, home=f"1:{apart.id}:1:0")
    apart.script.hear("rollout", 1, again)
    assert [m.home for m in apart.sent(0, LetGo)] == [apart.home]
    known = apart.known()
    assert known is not None and known.count == 1 and known.home == again.home and not known.spans
    apart.script.hear("rollout", 1, Lost(apart.id, 1, "its engine failed"))
    assert [m.home for m in apart.sent(1, LetGo)] == [again.home] and apart.script.owner(apart.id)[0] is None
