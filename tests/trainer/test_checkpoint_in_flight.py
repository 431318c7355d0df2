"""A checkpoint is written beside the training: it is of the step that it was begun at, has its name only when
all ranks' bytes are on the disk, and whatever goes wrong is raised or leaves no name."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.trainer.checkpointing import Trainer
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.machine.files.durable import FileSum
from laminar_hpc.store import checkpoints
from laminar_hpc.store.checkpoints import checkpoint_path, fence, read_state, steps
from laminar_hpc.trainer.checkpointing import copies, in_flight
from laminar_hpc.trainer.checkpointing.copies import Wanted
from laminar_hpc.trainer.checkpointing.hf_files import HfFiles
from laminar_hpc.trainer.checkpointing.in_flight import InFlight
from laminar_hpc.trainer.checkpointing.reports import CheckpointPart, Reports

PART = CheckpointPart({"megatron/__0_0.distcp": FileSum(3, "abc")})


class Gate:
    """Holds up what writes hf/ until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open, write = threading.Event(), threading.Event(), HfFiles.write

        def held(files: HfFiles, folder: Path, content: object, check: Callable[[], None]) -> dict:
            self.reached.set()
            while not self._open.wait(0.01):
                check()
            return write(files, folder, content, check)

        monkeypatch.setattr(HfFiles, "write", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_beside_the_writing(
    distributed: bool, dtype: str, tied_model: Path, tmp_path: Path, world: None, gate: Gate
) -> None:
    """docs/promises.md#beside-training: what is written is the state at `begin`, however far training is
    when the disk has it; the name comes last."""
    settings = {"model__dtype": dtype, "trainer__distributed_optimizer": distributed}
    trainer = Trainer(tied_model, tmp_path, **settings)
    trainer.train(0, 1)
    begun_with = trainer.checkpointer.begin(1)
    assert gate.reached.wait(60)
    metrics = trainer.train(1, 3)
    trainer.checkpointer.poll()
    assert steps(tmp_path) == [] and trainer.checkpointer.state_hash() != begun_with
    gate.open()
    trainer.checkpointer.finish()
    assert steps(tmp_path) == [1]
    trainer.checkpointer.load(1)
    assert trainer.checkpointer.state_hash() == begun_with and trainer.train(1, 3) == metrics


def test_the_next_one_waits_for_the_one_before(
    tied_model: Path, tmp_path: Path, world: None, gate: Gate
) -> None:
    """Its buffers are those that are still written from."""
    trainer = Trainer(tied_model, tmp_path)
    trainer.checkpointer.begin(1)
    assert gate.reached.wait(60)
    threading.Timer(0.2, gate.open).start()
    trainer.checkpointer.begin(2)
    assert steps(tmp_path)[0] == 1
    trainer.checkpointer.finish()
    assert steps(tmp_path) == [1, 2]


def test_a_process_that_ends_leaves_no_half_of_one(
    tied_model: Path, tmp_path: Path, world: None, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is nearly there gets its name, one that is not gets none, and the thread ends."""
    monkeypatch.setattr("laminar_hpc.trainer.checkpoint._LAST_SECONDS", 0.3)
    trainer = Trainer(tied_model, tmp_path)
    trainer.checkpointer.begin(1)
    assert gate.reached.wait(60)
    trainer.checkpointer.close()
    assert steps(tmp_path) == [] and "checkpoint" not in {thread.name for thread in threading.enumerate()}
    monkeypatch.setattr("laminar_hpc.trainer.checkpoint._LAST_SECONDS", 60.0)
    gate.open()
    trainer.checkpointer.begin(2)
    trainer.checkpointer.close()
    assert steps(tmp_path) == [2]


def test_a_replaced_gang_cannot_spoil_the_files_of_the_next(
    tied_model: Path, tmp_path: Path, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stood still in the midst of writing a step's checkpoint goes on while the next trainer
    generation writes its own of the same step, whose name comes right after: what has the name is whole."""
    old = Trainer(tied_model, tmp_path, welcome=Welcome("run", trainer_generation=1))
    fence(tmp_path, 1)
    goes_on, write, publish = threading.Event(), HfFiles.write, checkpoints.publish

    def held(files: HfFiles, *given: object) -> dict:
        assert files is not old.checkpointer._hf or goes_on.wait(60)
        return write(files, *given)

    monkeypatch.setattr(HfFiles, "write", held)
    old.checkpointer.begin(1)
    writer = old.checkpointer._flight._thread

    def late(*given: object) -> None:
        if threading.current_thread() is not writer:
            goes_on.set()
            writer.join(60)
        publish(*given)

    monkeypatch.setattr(checkpoints, "publish", late)
    fence(tmp_path, 2)
    new = Trainer(tied_model, tmp_path, welcome=Welcome("run", trainer_generation=2))
    new.train(0, 1)
    new.checkpointer.save(1)
    old.checkpointer.close()
    assert read_state(checkpoint_path(tmp_path, 1))["gang"] == 2
    assert checkpoints.damage(checkpoint_path(tmp_path, 1)) == ""


def test_an_error_is_raised_in_the_training(
    tied_model: Path, tmp_path: Path, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next step, not at the end of the run; and the next checkpoint is written as if nothing had
    been."""
    trainer = Trainer(tied_model, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(HfFiles, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        trainer.checkpointer.begin(1)
        deadline = time.monotonic() + 60
        with pytest.raises(OSError, match="No space left"):
            while time.monotonic() < deadline:
                trainer.checkpointer.poll()
    with pytest.raises(OSError, match="No space left"):
        trainer.checkpointer.finish()
    trainer.checkpointer.save(2)
    assert steps(tmp_path) == [2]


def test_without_room_for_a_copy_training_waits(
    tied_model: Path, tmp_path: Path, world: None, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Then nothing is copied; one line says so."""
    monkeypatch.setattr(copies, "usable_memory", lambda: 1000)
    trainer = Trainer(tied_model, tmp_path)
    trainer.train(0, 1)
    saved_hash = trainer.checkpointer.begin(1)
    assert steps(tmp_path) == [1] and not trainer.checkpointer._copies._kept
    assert "no room for a copy of 0.0 GB beside the training" in caplog.text
    trainer.train(1, 2)
    trainer.checkpointer.load(1)
    assert trainer.checkpointer.state_hash() == saved_hash


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_the_buffers_are_there_before_the_first_one(
    distributed: bool, tied_model: Path, tmp_path: Path, world: None
) -> None:
    """docs/promises.md#beside-training: `prepare` makes them all; what is saved in them is the state at
    `begin`, to the last bit that of a checkpoint without them."""
    hashes, files = [], []
    for prepared in (True, False):
        settings = {"model__dtype": "bfloat16", "trainer__distributed_optimizer": distributed}
        trainer = Trainer(tied_model, tmp_path / str(prepared), **settings)
        checkpointer, kept = trainer.checkpointer, trainer.checkpointer._copies._kept
        trainer.train(0, 1)
        if prepared:
            checkpointer.prepare()
            checkpointer._copies._join()
        before = {name: buffer.data_ptr() for name, buffer in kept.items()}
        trainer.train(1, 2)
        path, state_hash = checkpointer.save(2)
        assert bool(before) == prepared
        assert not prepared or before == {name: buffer.data_ptr() for name, buffer in kept.items()}
        trainer.train(2, 3)
        checkpointer.load(2)
        hashes += [state_hash, checkpointer.state_hash()]
        files.append(
            {name: (path / name).read_bytes() for name in ("hf/model.safetensors", "megatron/__0_0.distcp")}
        )
    assert len(set(hashes)) == 1 and files[0] == files[1]


def test_buffers_that_cannot_be_made_are_no_error(
    tied_model: Path, tmp_path: Path, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the training: without room none is made, and one that cannot be had is said by who needs it."""
    huge = Wanted("huge", (1 << 60,), torch.float32)
    kept = copies.HostCopies(1)
    kept.make([huge])
    with pytest.raises(RuntimeError):
        kept.buffer(huge)
    monkeypatch.setattr(copies, "usable_memory", lambda: 1000)
    trainer = Trainer(tied_model, tmp_path)
    trainer.checkpointer.prepare()
    assert trainer.checkpointer._copies._thread is None and not trainer.checkpointer._copies._kept


def test_the_making_of_buffers_ends_with_the_process() -> None:
    """In its midst."""
    kept, number = copies.HostCopies(1), itertools.count()
    kept.make(Wanted(f"{n}", (1,), torch.float32) for n in number)
    kept.close()
    assert kept._thread is None and next(number) == len(kept._kept) + 1


# ---- several ranks, as threads over one store --------------------------------------------------------------


def flight(
    rank: int, store: dist.Store, write: Callable[[], CheckpointPart], done: list, seconds: float = 60
) -> InFlight:
    reports = Reports(store, "some", 2)
    complete = done.append if rank == 0 else None
    return InFlight("checkpoint 1", reports, rank, lambda check: write(), complete, seconds)


def test_rank_0_waits_for_the_parts_of_all() -> None:
    """It completes the checkpoint once, with all parts in the order of the ranks, and leaves nothing in the
    store."""
    store, done, written = dist.HashStore(), [], threading.Event()

    def write() -> CheckpointPart:
        written.wait(60)
        return CheckpointPart(PART.files)

    both = [flight(0, store, lambda: PART, done), flight(1, store, write, done)]
    for each in both:
        each.start(in_foreground=False)
    both[0]._thread.join(0.5)
    assert both[0]._thread.is_alive() and not done
    written.set()
    for each in both:
        each.wait()
    assert [part.files for part in done[0]] == [PART.files] * 2 and not store.check(["checkpoint/some/1"])


def test_a_rank_that_fails_or_does_not_come_is_named() -> None:
    """By rank 0, which gives the checkpoint no name; the other raises its own error."""

    def fail() -> CheckpointPart:
        raise OSError(28, "No space left on device")

    store, done = dist.HashStore(), []
    both = [flight(0, store, lambda: PART, done), flight(1, store, fail, done)]
    for each in both:
        each.start(in_foreground=False)
    with pytest.raises(
        LaminarError, match=r"trainer 1 cannot write its part of a checkpoint: OSError: .*No space"
    ):
        both[0].wait()
    with pytest.raises(OSError, match="No space"):
        both[1].wait()
    alone = flight(0, dist.HashStore(), lambda: PART, done, seconds=0.3)
    alone.start(in_foreground=False)
    with pytest.raises(LaminarError, match=r"waited 0 s for the parts of trainers 1 of a checkpoint"):
        alone.wait()
    assert not done


def test_a_failure_is_heard_while_the_trainer_waits_for_a_batch() -> None:
    """Promise: a checkpoint that cannot be written ends the run at once, unless the trainer's thread waits
    for it and raises the error itself."""
    heard, full = list[BaseException](), OSError(28, "No space left on device")

    def complete(_: list[CheckpointPart]) -> None:
        raise full

    def run(in_foreground: bool) -> InFlight:
        reports = Reports(dist.HashStore(), "some", 1)
        flight = InFlight("checkpoint 1", reports, 0, lambda check: PART, complete, 60, heard.append)
        flight.start(in_foreground)
        return flight

    run(False)._thread.join(30)
    assert heard == [full]
    with pytest.raises(OSError, match="No space"):
        run(True)
    assert heard == [full]


def test_a_disk_that_hangs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that ranks are waited for."""
    hung = threading.Event()

    def hang() -> CheckpointPart:
        hung.wait(60)
        return PART

    waiting = flight(1, dist.HashStore(), hang, [], seconds=0.1)
    monkeypatch.setattr(in_flight, "_MARGIN_SECONDS", 0.1)
    try:
        waiting.start(in_foreground=False)
        with pytest.raises(LaminarError, match=r"trainer 1 waited 0 s for its part of checkpoint 1 to be"):
            waiting.wait()
    finally:
        hung.set()
