"""Which trainers may go on: the last that came, and nobody whom they have replaced."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from laminar_hpc.cluster.checkpoints import checkpoint_path, newest_gang
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.gang import Gang
from laminar_hpc.controller.members import Member, Members
from laminar_hpc.controller.membership import Membership
from laminar_hpc.controller.shared import Outbox, RunState, Shared
from laminar_hpc.controller.store import Store
from laminar_hpc.controller.training import Training
from laminar_hpc.messages.data import Message
from laminar_hpc.messages.membership import GangEnded, Hello, Welcome
from laminar_hpc.messages.training import Restored, StepDone, TakeBatch, TrainersMeet


class Entry:
    """A controller's, as far as workers that come see it."""

    def __init__(self, run_dir: Path, store: Store) -> None:
        config, derived = RunConfig(run_dir=str(run_dir), role="controller"), SimpleNamespace(trainer_ranks=2)
        self.members, self.outbox, self.records = Members("here", 10.0), Outbox(), []
        metrics = SimpleNamespace(write=lambda kind, **fields: self.records.append((kind, fields)))
        self.lines: list[str] = []
        self.shared = Shared(
            config, derived, RunState(0), self.members, self.outbox, metrics, self.lines.append
        )
        self.forgotten = 0
        self.gang = Gang(self.shared, store, self.forget)
        self.membership = Membership(self.shared, SimpleNamespace(), "run", store, self.gang, lambda _: None)

    def forget(self) -> None:
        self.forgotten += 1

    def hello(self, incarnation: str, index: int = 0) -> list[Message]:
        """What it is answered."""
        hello = Hello("trainer", index, incarnation, pid=1, machine="there")
        self.membership.on_hello(f"trainer:{index}:{incarnation}", hello)
        return self.answers(f"trainer:{index}:{incarnation}")

    def answers(self, identity: str) -> list[Message]:
        return [message for to, message in self.outbox.take() if to == identity]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_each_life_of_the_trainers_is_a_gang_of_its_own(tmp_path: Path, store: Store) -> None:
    """The number rises with each, over controllers too; a reconnection is none. Before the gang is let in
    only it may write checkpoints."""
    entry = Entry(tmp_path, store)
    (first,) = entry.hello("a")
    assert isinstance(first, Welcome) and first.gang == newest_gang(tmp_path) == 1
    assert first.store_id == store.store_id
    assert [m.gang for m in entry.hello("x", index=1)] == [1], "another rank is of the same gang"
    assert [m.gang for m in entry.hello("a")] == [1]
    entry = Entry(tmp_path, store)
    assert [m.gang for m in entry.hello("a")] == [1], "it has outlived its controller"
    assert [m.gang for m in entry.hello("b")] == [2] and newest_gang(tmp_path) == 2
    store.close()


def test_a_replaced_gang_cannot_come_back(tmp_path: Path, store: Store) -> None:
    """Not even when those who took its place are gone."""
    entry = Entry(tmp_path, store)
    entry.hello("a")
    entry.hello("b")
    entry.members.leave(entry.members.at("trainer"))
    (answer,) = entry.hello("a")
    assert isinstance(answer, GangEnded) and "other trainers have taken the place" in answer.reason
    assert entry.members.at("trainer") is None and newest_gang(tmp_path) == 2
    store.close()


def test_ranks_of_the_next_gang_are_not_sent_to_the_last_ones_place(tmp_path: Path, store: Store) -> None:
    """Where the trainers meet is said by each trainer 0 anew."""
    entry = Entry(tmp_path, store)
    entry.hello("a")
    entry.gang.on_trainers_meet(entry.members.at("trainer"), TrainersMeet("there", 1))
    assert len(entry.hello("x", index=1)) == 2
    entry.hello("b")
    assert len(entry.hello("y", index=1)) == 1
    store.close()


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (lambda t, m: t.on_take_batch(m, TakeBatch(0)), "asks for step 0 and has not said where it starts"),
        (lambda t, m: t.on_step_done(m, StepDone(0, {})), "has done step 0 and has not said where it starts"),
        (
            lambda t, m: t.on_restored(m, Restored(None)),
            "sees no checkpoint in .* the controller sees that of step 4: run_dir must be on a file system",
        ),
    ],
    ids=["batch", "step", "unseen"],
)
def test_trainers_that_are_not_where_the_run_is_end_it(
    say: Callable[[Training, Member], None], reason: str, tmp_path: Path, store: Store
) -> None:
    """They get no batch of a step that is another to the store, and a run does not begin anew because one
    machine does not see its checkpoints."""
    entry = Entry(tmp_path, store)
    entry.hello("a")
    checkpoint = checkpoint_path(tmp_path, 4)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    training = Training(entry.shared, SimpleNamespace(), None, SimpleNamespace(), store, None)
    with pytest.raises(LaminarError, match=f"trainer 0 {reason}"):
        say(training, entry.members.at("trainer"))
    store.close()
