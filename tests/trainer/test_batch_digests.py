"""docs/promises.md#intact-responses: the trainer trains on nothing but what was generated."""

import shutil
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import made
from helpers.trainer import tiny
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.routing import RouteShape
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.training import Batch
from laminar_hpc.store.payload.routes import pack_routes
from laminar_hpc.store.payload.writer import FOLDER
from laminar_hpc.trainer import loop
from laminar_hpc.trainer.inbox import BatchInbox, Unreadable
from laminar_hpc.trainer.step.batch import StepBatch
from laminar_hpc.trainer.step.guard import GuardReport


class Channel:
    """Answers with the given messages."""

    sessions = 0

    def __init__(self, *answers: Message) -> None:
        self._answers = deque(answers)

    def send(self, message: Message) -> None:
        pass

    def wait(self, *wanted: type, timeout: float, session: int) -> Message:
        return self._answers.popleft()


def taken(run_dir: Path, batch: Batch, routes: RouteShape | None = None) -> StepBatch:
    cluster = SimpleNamespace(batch_timeout_seconds=10.0)
    config = SimpleNamespace(cluster=cluster)
    context = SimpleNamespace(channel=Channel(batch), config=config, run_dir=run_dir)
    progress = SimpleNamespace(advance=lambda: None, enter=lambda phase: None)
    found = BatchInbox(context, progress, routes).take(batch.step)
    assert found is not None
    return found


def test_responses_come_with_their_routes_or_not_at_all(world, tmp_path):
    """With algorithm.routing_replay each has a row for each input token; one without is lost, by name, as
    what is damaged is, and the others train."""
    shape, batch = RouteShape((0, 1), 2, 8), tiny.make_batch(0)
    draw = np.random.default_rng(0)
    rows = {
        t.trajectory_id: draw.integers(
            0, 8, (len(t.prompt_tokens) + len(t.response_tokens) - 1, 2, 2), np.uint8
        )
        for t in batch
    }
    packed = {i: pack_routes(i, 0, of) for i, of in rows.items()}
    step = taken(tmp_path, Batch(7, made.groups(tmp_path, batch, packed), 4, ""), shape)
    for planned, found in zip(step.planned, step.read(step.planned), strict=True):
        assert found.routed_experts is not None and len(found.routed_experts) == planned.length
        assert np.array_equal(found.routed_experts, rows[found.trajectory_id])
    lost = {i: of if i != 5 else bytes(len(of)) for i, of in packed.items()}
    step = taken(tmp_path, Batch(7, made.groups(tmp_path, batch, lost), 4, ""), shape)
    with pytest.raises(
        Unreadable, match=r"routes of trajectory 5 are not in .* .there are no routes"
    ) as error:
        step.read(step.planned)
    assert [sample.trajectory_id for sample in error.value.samples] == [5]


@pytest.mark.parametrize("what", ["token", "log-prob", "mask", "record", "elsewhere"])
def test_a_changed_response_ends_the_run_in_one_line(world, tmp_path, what):
    """The line names the trajectory, the file where it lies, and the command that looks at the rest."""
    batch = tiny.make_batch(0)
    groups = made.groups(tmp_path, batch)
    step = taken(tmp_path, Batch(7, groups, 4, ""))
    for found, was in zip(step.read(step.planned), batch, strict=True):
        assert found.tokens.tolist() == was.response_tokens and found.loss_mask.tolist() == was.loss_mask
        assert found.logprobs.tolist() == was.response.logprobs.tolist()
    changed = groups[1].trajectories[1]
    assert changed.place is not None
    path, last = tmp_path / FOLDER / changed.place.file, changed.place.offset + changed.place.size - 1
    content = bytearray(path.read_bytes())
    if what == "record":
        changed.digest = "0" * 32
    elif what == "elsewhere":
        changed.place = groups[0].trajectories[0].place
    else:
        content[{"token": last - 8 * changed.length, "log-prob": last - 8, "mask": last - 3}[what]] ^= 1
    path.write_bytes(content)
    step = taken(tmp_path, Batch(7, groups, 4, ""))
    with pytest.raises(LaminarError, match=r"^the response of trajectory 5 .* laminar audit RUN_DIR$"):
        step.read(step.planned)


def test_another_batch_is_asked_for(world, tmp_path):
    """docs/promises.md#intact-responses: a step whose responses cannot all be read asks for another batch
    and names them, before anything is trained; where none can be read, the run ends: that is the file
    system."""
    groups = made.groups(tmp_path, tiny.make_batch(0))
    whole = made.groups(tmp_path, tiny.make_batch(1))
    place = groups[1].trajectories[1].place
    with open(tmp_path / FOLDER / place.file, "rb+") as file:
        file.seek(place.offset + place.size - 1)
        file.write(b"\xff")
    channel = Channel(Batch(7, groups, 4, ""), Batch(7, whole, 4, ""))
    sent = list[Message]()
    channel.send = sent.append
    config = RunConfig()
    inbox = BatchInbox(
        SimpleNamespace(channel=channel, config=config, run_dir=tmp_path),
        SimpleNamespace(advance=lambda: None, enter=lambda phase: None),
    )
    trained = []

    def train(batch: StepBatch, *_: object) -> dict[str, float]:
        trained.append([r.trajectory_id for r in batch.read(batch.planned)])
        return {"trajectories": 1.0}

    context = SimpleNamespace(config=config, trace=SimpleNamespace(span=lambda *_, **__: nullcontext()))
    learner = SimpleNamespace(train=train, mismatches={}, guarded=GuardReport())
    done = loop._train(context, inbox, learner, None, SimpleNamespace(enter=lambda phase: None), 7)
    assert done is not None and trained == [[t.trajectory_id for g in whole for t in g.trajectories]]
    bad = groups[1].trajectories[1].trajectory_id
    assert [[s.trajectory_id for s in message.unreadable] for message in sent] == [[], [bad]]
    assert f"the response of trajectory {bad} is not in" in sent[1].why
    shutil.rmtree(tmp_path / FOLDER)
    step = taken(tmp_path, Batch(7, groups, 4, ""))
    with pytest.raises(LaminarError) as raised:
        step.read(step.planned)
    assert not isinstance(raised.value, Unreadable)
