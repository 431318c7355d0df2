"""A damaged payload file of answers that are not trained yet."""

from pathlib import Path

import pytest

from helpers.control.script import Script, samples_of, scripted
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.messages.data import Sample
from laminar_hpc.line.messages.training import Batch, TakeBatch


def with_a_batch(folder: Path) -> tuple[Script, Batch, list[str]]:
    """Two groups of two, all of which went out for the first step; the third waits."""
    said = list[str]()
    script = scripted(folder, prompts=2, local_batch_groups=2, say=said.append)
    grant, _ = script.working(2)
    script.ends(0, grant, 12)
    script.hear("trainer", 0, TakeBatch(0))
    return script, script.batches()[-1], said


def test_they_are_generated_again(tmp_path):
    """Promise: docs/promises.md#intact-responses. The trainer names what it cannot read: that is given
    out again, the rest of its batch waits, one line says so, and the step is trained when all is there. Asked
    another time, nothing more is lost."""
    script, batch, said = with_a_batch(tmp_path)
    bad = batch.groups[1].trajectories[0]
    asked = TakeBatch(0, 0, [Sample(bad.trajectory_id, bad.attempt)], "its file is damaged")
    script.hear("trainer", 0, asked)
    assert len(script.batches()) == 1 and script.state().ready_groups == 1
    [told] = [line for line in said if line.startswith("warning")]
    assert "1 responses cannot be read and are generated again; the first: its file is damaged" in told
    script.asks(0, 0, script.newest_batch(0))
    grant = script.granted(0)
    assert samples_of(grant)[bad.trajectory_id] == bad.attempt + 1
    script.ends(0, grant, 12)
    if len(script.batches()) == 1:
        script.controller.turn()
    again = script.batches()[-1]
    assert [g.group_id for g in again.groups] == [g.group_id for g in batch.groups]
    assert again.groups[1].trajectories[0].attempt == bad.attempt + 1
    script.hear("trainer", 0, asked)
    assert script.batches()[-1] == again and said[-1] == told
    script.ends_clean()


def test_a_resume_comes_to_the_same(tmp_path):
    """Promise: docs/promises.md#intact-responses. Also where the controller has started again since."""
    script, batch, _ = with_a_batch(tmp_path)
    script = script.again()
    assert script.state().ready_groups == 2
    script.hear("trainer", 0, TakeBatch(0))
    bad = batch.groups[0].trajectories[1]
    script.hear("trainer", 0, TakeBatch(0, 0, [Sample(bad.trajectory_id, bad.attempt)], "damaged"))
    assert script.state().ready_groups == 1
    script.ends_clean()


def test_a_replay_cannot_generate(tmp_path):
    """Promise: docs/promises.md#intact-responses. There it is the one line that it was."""
    script, batch, _ = with_a_batch(tmp_path)
    script.controller.training._replay = script.controller.store
    bad = batch.groups[0].trajectories[0]
    with pytest.raises(LaminarError, match=r"^its file is damaged$"):
        script.hear("trainer", 0, TakeBatch(0, 0, [Sample(bad.trajectory_id, 0)], "its file is damaged"))
