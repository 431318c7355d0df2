"""docs/architecture.md#intact-responses: the trainer trains on nothing but what was generated."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

import made
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.messages.data import Message
from laminar_hpc.messages.training import Batch
from laminar_hpc.payload.writer import FOLDER
from laminar_hpc.trainer.inbox import Inbox
from laminar_hpc.trainer.step.batch import StepBatch


class Channel:
    """Answers with the given messages."""

    sessions = 0

    def __init__(self, *answers: Message) -> None:
        self._answers = deque(answers)

    def send(self, message: Message) -> None:
        pass

    def wait(self, *wanted: type, timeout: float, session: int) -> Message:
        return self._answers.popleft()


def taken(run_dir: Path, batch: Batch) -> StepBatch:
    cluster = SimpleNamespace(batch_timeout_seconds=10.0)
    config = SimpleNamespace(cluster=cluster)
    context = SimpleNamespace(channel=Channel(batch), config=config, run_dir=run_dir)
    progress = SimpleNamespace(advance=lambda: None, enter=lambda phase: None)
    found = Inbox(context, progress).take(batch.step)
    assert found is not None
    return found


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
