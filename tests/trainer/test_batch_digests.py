"""docs/architecture.md#intact-responses: the trainer trains on nothing but what was generated."""

from collections import deque
from types import SimpleNamespace

import pytest
import tiny

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.messages.data import Message
from laminar_hpc.messages.digest import sealed
from laminar_hpc.messages.training import Batch
from laminar_hpc.trainer.inbox import Inbox


class Channel:
    """Answers with the given messages."""

    sessions = 0

    def __init__(self, *answers: Message) -> None:
        self._answers = deque(answers)

    def send(self, message: Message) -> None:
        pass

    def wait(self, *wanted: type, timeout: float, session: int) -> Message:
        return self._answers.popleft()


def taken(batch: Batch) -> Batch | None:
    cluster = SimpleNamespace(batch_timeout_seconds=10.0)
    context = SimpleNamespace(channel=Channel(batch), config=SimpleNamespace(cluster=cluster))
    progress = SimpleNamespace(advance=lambda: None, enter=lambda phase: None)
    return Inbox(context, progress).take(batch.step)


@pytest.mark.parametrize("what", ["token", "log-prob", "digest"])
def test_a_changed_response_ends_the_run_in_one_line(world, what):
    """The line names the trajectory and the command that looks at the rest."""
    batch = Batch(7, [sealed(t) for t in tiny.make_batch(0)], 4)
    assert taken(batch) == batch
    changed = batch.trajectories[5]
    if what == "token":
        changed.response_tokens[1] ^= 1
    elif what == "log-prob":
        changed.logprobs[0] += 1e-9
    else:
        changed.digest = ""
    text = r"^trajectory 5 of step 7 has not the digest .* laminar audit RUN_DIR$"
    with pytest.raises(LaminarError, match=text):
        taken(batch)
