"""Which trainers may go on: the last that came, and nobody whom they have replaced."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.fleet.members import Member, Members
from laminar_hpc.controller.fleet.membership import Membership
from laminar_hpc.controller.fleet.trainer_generation import StopCutShort, TrainerGeneration
from laminar_hpc.controller.shared import Outbox, RunState, Shared
from laminar_hpc.controller.takeover import Continuation
from laminar_hpc.controller.training import Training
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.membership import Failure, Goodbye, Hello, TrainersEnded, Welcome
from laminar_hpc.line.messages.training import (
    Leave,
    Restored,
    StepDone,
    TakeBatch,
    TrainerDone,
    TrainersMeet,
)
from laminar_hpc.store.checkpoints import checkpoint_path, newest_trainer_generation
from laminar_hpc.store.store import Store


class Entry:
    """A controller's, as far as workers that come see it."""

    def __init__(self, run_dir: Path, store: Store, ranks: int = 2) -> None:
        config = RunConfig(run_dir=str(run_dir), role="controller")
        derived = SimpleNamespace(trainer_ranks=ranks)
        self.members, self.outbox, self.records = Members("here", 10.0, 10.0), Outbox(), []
        metrics = SimpleNamespace(write=lambda kind, **fields: self.records.append((kind, fields)))
        self.lines: list[str] = []
        self.shared = Shared(
            config, derived, RunState(0), self.members, self.outbox, metrics, self.lines.append
        )
        self.forgotten = 0
        self.trainer_generation = TrainerGeneration(self.shared, store, [self])
        part = SimpleNamespace(other_trainers=lambda: None, joined=lambda _: None)
        flow = SimpleNamespace(
            **vars(self.shared),
            roles_apart=self.shared.roles_apart,
            store=store,
            slots="slots",
            weights=part,
            active_replicas=part,
            continuation=part,
            told_of_losses=[],
        )
        self.membership = Membership(flow, "run", self.trainer_generation, part, part)

    def tables(self, store: Store) -> SimpleNamespace:
        """Those of a controller without trajectories."""
        shared = {**vars(self.shared), "request_stop": self.shared.request_stop, "fail": self.shared.fail}
        return SimpleNamespace(**shared, store=store, tracker=None, evaluations=None, replay=None)

    def trainers_ended(self) -> None:
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
    """The number rises with each, over controllers too; a reconnection is none. Before the trainer generation
    is let in only it may write checkpoints."""
    entry = Entry(tmp_path, store)
    (first,) = entry.hello("a")
    assert isinstance(first, Welcome) and first.trainer_generation == newest_trainer_generation(tmp_path) == 1
    assert first.store_id == store.store_id
    assert [m.trainer_generation for m in entry.hello("x", index=1)] == [1], (
        "another rank is of the same trainer generation"
    )
    assert [m.trainer_generation for m in entry.hello("a")] == [1]
    entry = Entry(tmp_path, store)
    assert [m.trainer_generation for m in entry.hello("a")] == [1], "it has outlived its controller"
    assert [m.trainer_generation for m in entry.hello("b")] == [2] and newest_trainer_generation(
        tmp_path
    ) == 2
    store.close()


def test_a_replaced_gang_cannot_come_back(tmp_path: Path, store: Store) -> None:
    """Not even when those who took its place are gone."""
    entry = Entry(tmp_path, store)
    entry.hello("a")
    entry.hello("b")
    entry.members.leave(entry.members.at("trainer"))
    (answer,) = entry.hello("a")
    assert isinstance(answer, TrainersEnded) and "other trainers have taken the place" in answer.reason
    assert entry.members.at("trainer") is None and newest_trainer_generation(tmp_path) == 2
    store.close()


def test_ranks_of_the_next_gang_are_not_sent_to_the_last_ones_place(tmp_path: Path, store: Store) -> None:
    """Where the trainers meet is said by each trainer 0 anew."""
    entry = Entry(tmp_path, store)
    entry.hello("a")
    entry.trainer_generation.on_trainers_meet(entry.members.at("trainer"), TrainersMeet("there", 1))
    assert len(entry.hello("x", index=1)) == 2
    entry.hello("b")
    assert len(entry.hello("y", index=1)) == 1
    store.close()


def test_a_gang_that_starts_meets_over_a_controller_s_death(tmp_path: Path, store: Store) -> None:
    """Trainer 0 has said where they meet, and the controller dies before the other rank has come, or before
    it was told. The next trainer generation is not sent there by any controller."""
    entry = Entry(tmp_path, store)
    entry.hello("a")
    place = TrainersMeet("there", 1)
    entry.trainer_generation.on_trainers_meet(entry.members.at("trainer"), place)
    entry = Entry(tmp_path, store)
    entry.hello("a")
    assert [m for m in entry.hello("x", index=1) if isinstance(m, TrainersMeet)] == [place]
    entry = Entry(tmp_path, store)
    assert place in entry.hello("x", index=1), "it may have been on its way"
    assert place not in entry.hello("y", index=1)
    assert place not in Entry(tmp_path, store).hello("b")
    store.close()


def test_one_rank_lost_ends_its_gang(tmp_path: Path, store: Store) -> None:
    """The other rank is told, the fence rises before anyone has come, one line says what the run waits for,
    and a rank that comes before its rank 0 is of the next trainer generation."""
    entry = Entry(tmp_path, store)
    entry.hello("a"), entry.hello("x", index=1)
    entry.membership.on_failure(entry.members.at("trainer", 1), Failure("out of luck"))
    (told,) = entry.answers("trainer:0:a")
    assert (
        isinstance(told, TrainersEnded)
        and "generation 1 of trainers has ended: trainer 1 failed" in told.reason
    )
    assert (
        not entry.members.all("trainer") and entry.forgotten == 1 and newest_trainer_generation(tmp_path) == 2
    )
    (line,) = entry.lines
    assert line.endswith("out of luck; the others go on, and wait up to 300 s for trainers to start again")
    assert entry.records == [
        ("gang_ended", {"gang": 1, "step": 0, "reason": "trainer 1 failed: out of luck"})
    ]
    assert (
        [m.trainer_generation for m in entry.hello("y", index=1)]
        == [m.trainer_generation for m in entry.hello("b")]
        == [2]
    )
    assert entry.forgotten == 1
    store.close()


def test_a_rank_that_starts_again_unseen_ends_the_gang(tmp_path: Path, store: Store) -> None:
    """Its death was not noticed before it came back; also over a controller's restart."""
    entry = Entry(tmp_path, store)
    entry.hello("a"), entry.hello("x", index=1)
    entry = Entry(tmp_path, store)
    assert [m.trainer_generation for m in entry.hello("a")] == [1]
    entry.members.at("trainer").last_seen -= 5.0
    assert [m.trainer_generation for m in entry.hello("y", index=1)] == [2] and newest_trainer_generation(
        tmp_path
    ) == 2
    assert entry.members.at("trainer") is None, "the old trainer 0 is of another life"
    store.close()


def test_another_layout_after_a_restart_is_another_gang(tmp_path: Path, store: Store) -> None:
    """Its rank 1 may come before its rank 0, and the earlier trainer generation had none."""
    entry = Entry(tmp_path, store, ranks=1)
    entry.hello("a")
    entry = Entry(tmp_path, store, ranks=2)
    assert (
        [m.trainer_generation for m in entry.hello("x", index=1)]
        == [m.trainer_generation for m in entry.hello("b")]
        == [2]
    )
    assert len(entry.members.all("trainer")) == 2
    store.close()


def test_the_run_waits_for_trainers_no_longer_than_it_says(tmp_path: Path, store: Store) -> None:
    """Nor for those who fail again at the same place."""
    entry = Entry(tmp_path, store)
    entry.hello("a"), entry.hello("x", index=1)
    entry.trainer_generation.end("trainer 0 has died")
    entry.hello("b")
    entry.trainer_generation.tick(time.monotonic() + 299)
    with pytest.raises(LaminarError, match=r"waited 300 s for trainers .*; 1 of 2 are missing"):
        entry.trainer_generation.tick(time.monotonic() + 301)
    entry.hello("y", index=1)
    entry.trainer_generation.tick(time.monotonic() + 1e6)
    entry.membership.on_failure(entry.members.at("trainer"), Failure("no good"))
    entry.hello("c")
    with pytest.raises(LaminarError, match="no good; other trainers are not awaited: the same happened"):
        entry.membership.on_failure(entry.members.at("trainer"), Failure("no good"))
    store.close()


def test_trainers_whose_job_is_in_the_queue_are_awaited_longer(tmp_path: Path, store: Store) -> None:
    """Promise (docs/promises.md#failure-domains): as long as their job waits for nodes the run waits for
    it, unless it is to stop. What was seen before they were lost does not count."""
    entry, queued = Entry(tmp_path, store), tmp_path / "jobs" / "queued.trainer"
    queued.parent.mkdir()
    queued.touch()
    entry.hello("a"), entry.hello("x", index=1)
    entry.trainer_generation.end("trainer 0 has died")
    assert not queued.exists()
    now = time.monotonic()
    for late in 301, 603, 905:
        queued.touch()
        entry.trainer_generation.tick(now + late)
        entry.trainer_generation.tick(now + late + 290)
        assert entry.lines[-1].endswith("their job is in Slurm's queue; the others go on")
    assert len(entry.lines) == 4
    entry.shared.state.stopping = "SIGUSR1"
    with pytest.raises(StopCutShort, match=r"waited 300 s for trainers to start again .*, before"):
        entry.trainer_generation.tick(now + 1206)
    entry.shared.state.stopping = ""
    with pytest.raises(LaminarError, match="are missing; start all roles again"):
        entry.trainer_generation.tick(now + 1208)
    store.close()


def test_trainers_leave_a_run_that_goes_on(tmp_path: Path, store: Store) -> None:
    """Promise (docs/promises.md#failure-domains): when their job is to end all ranks finish the step
    under way and leave, and the run waits for the next trainer generation. Who is asked before anybody has
    come, or is asked once more, changes nothing; a stop of the run that comes meanwhile finds it stopped in
    order."""
    for stopped in False, True:
        entry = Entry(tmp_path, store)
        state, nothing = entry.shared.state, SimpleNamespace()
        continuation = Continuation(store, state, None)
        training = Training(entry.tables(store), nothing, continuation, nothing, None)
        entry.trainer_generation.ask_to_leave("SIGUSR1")
        assert not state.trainers_leave
        entry.hello(f"a{stopped}"), entry.hello(f"x{stopped}", index=1)
        trainer, other = entry.members.all("trainer")
        state.trainer_generation, state.groups_taken = trainer.identity, 8
        training._request = TakeBatch(0, 1)
        entry.trainer_generation.ask_to_leave("SIGUSR1")
        entry.trainer_generation.ask_to_leave("SIGTERM")
        state.groups_taken = 0
        training.answer_trainer()
        assert entry.answers(trainer.identity) == [Leave("SIGUSR1")]
        training.on_trainer_done(trainer, TrainerDone(3))
        assert not state.trainer_done and not state.finished
        if stopped:
            entry.shared.request_stop("SIGTERM")
        number = entry.trainer_generation.number
        entry.membership.on_goodbye(trainer, Goodbye())
        assert entry.trainer_generation.number == number and not entry.answers(other.identity), (
            "it leaves in order too"
        )
        entry.membership.on_goodbye(other, Goodbye())
        assert state.finished is stopped and entry.trainer_generation.number == number + (not stopped)
        assert bool(state.trainers_leave) is stopped
    assert entry.lines[0].endswith("SIGUSR1: the trainers finish step 1, then a checkpoint; the others go on")
    store.close()


def test_trainers_are_lost_while_the_run_stops(tmp_path: Path, store: Store) -> None:
    """Promise: a run that was to stop, and has lost its trainers, ends at once; what had asked it to stop
    decides whether its jobs are requeued (launch/slurm/ending.py)."""
    entry = Entry(tmp_path, store)
    entry.hello("a"), entry.hello("x", index=1)
    entry.shared.state.trainer_generation = "a"
    entry.shared.request_stop("SIGTERM")
    with pytest.raises(StopCutShort, match="trainer 0 has died, before the run could stop; go on with"):
        entry.trainer_generation.end("trainer 0 has died")
    store.close()


def test_a_stopped_rank_is_killed_after_its_gang(tmp_path: Path, store: Store) -> None:
    """It cannot leave by itself, and its agent waits for it; a later process of the same pid is left
    alone."""
    entry = Entry(tmp_path, store)
    stopped, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        for index, process in enumerate((stopped, other)):
            hello = Hello("trainer", index, "a", process.pid, "here")
            entry.membership.on_hello(f"trainer:{index}:a", hello)
        entry.trainer_generation._started[other.pid] = "another"
        stopped.send_signal(signal.SIGSTOP)
        entry.trainer_generation.end("trainer 0 is stopped")
        entry.hello("b"), entry.hello("y", index=1)
        entry.trainer_generation.tick(time.monotonic())
        assert stopped.poll() is None
        entry.trainer_generation.tick(time.monotonic() + 6)
        assert stopped.wait(5) == -signal.SIGKILL and other.poll() is None
    finally:
        for process in (stopped, other):
            process.kill()
            process.wait()
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
    continuation = Continuation(store, entry.shared.state, None)
    nothing = SimpleNamespace()
    training = Training(entry.tables(store), nothing, continuation, nothing, None)
    with pytest.raises(LaminarError, match=f"trainer 0 {reason}"):
        say(training, entry.members.at("trainer"))
    store.close()


@pytest.mark.parametrize(
    ("trainer_generation", "state", "text", "finished"),
    [
        ("", {}, "the trainer is not there yet, so there is nothing to save", True),
        ("trainer:0:a", {"trainer_step": 50}, "no step is under way; a checkpoint of step 50", False),
        (
            "trainer:0:a",
            {"trainer_step": 50, "groups_taken": 8},
            "finishing step 51, then a checkpoint",
            False,
        ),
        (
            "trainer:0:a",
            {"trainer_step": 60, "trainer_done": True},
            "step 60 is trained and saved; the evaluation of it is left out",
            True,
        ),
    ],
)
def test_a_stop_says_what_goes_on(store, tmp_path, trainer_generation, state, text, finished):
    """Promise: Ctrl-C in set-up, before a step, in one, and in the last evaluation says what it waits for."""
    entry = Entry(tmp_path, store)
    entry.shared.state.trainer_generation = trainer_generation
    for name, value in state.items():
        setattr(entry.shared.state, name, value)
    entry.shared.request_stop("SIGINT")
    assert entry.lines == [f"stopping     SIGINT: {text}"] and entry.shared.state.finished is finished
