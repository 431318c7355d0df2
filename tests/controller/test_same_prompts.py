"""A run that goes on with other data: groups in progress keep the prompts that they were granted for."""

import pytest
from reports import trajectory

from laminar_hpc.config.errors import Refused
from laminar_hpc.controller.same_prompts import check_same_prompts
from laminar_hpc.controller.store import Store
from laminar_hpc.controller.tracker import TrajectoryTracker
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.policies.sampling import GroupSize

PROMPTS = [Prompt(f"{i}+1=", [i, 7], {"n": i}) for i in range(5)]


def test_groups_in_progress_keep_their_prompts(tmp_path):
    """Promise: other rows are refused in one line as long as a group in progress, or one whose response is
    not scored, was granted for an earlier one; rows behind them may come, and finished groups need none."""
    store = Store(tmp_path)
    tracker = TrajectoryTracker(store, PROMPTS, GroupSize(1, 1, 1), lambda draw: draw)
    tracker.recover()
    groups = tracker.draw(3, 3, replica=0, weight_id=0, weight_step=0, now=0.0)
    for group in groups[1:]:
        tracker.generated(trajectory(group, group.samples[0]), 0)
    done = groups[1].samples[0]
    tracker.scored(done.trajectory_id, done.attempt, 1.0, {}, "", 3.0)
    store.commit()
    store.close()
    path = tmp_path / "store.sqlite"
    other = Prompt("9+9=", [9, 9], {})
    check_same_prompts(path, PROMPTS)
    check_same_prompts(path, [*PROMPTS, other])
    check_same_prompts(path, [PROMPTS[0], other, PROMPTS[2]])  # that of the finished one
    with pytest.raises(
        Refused, match=r"data.train: prompt 1 of 5 is another one than when group 0 was granted"
    ):
        check_same_prompts(path, PROMPTS[::-1])
    with pytest.raises(Refused, match=r"prompt 3 of 2 is missing, which was there when group 2 was granted"):
        check_same_prompts(path, PROMPTS[:2])


def test_a_run_that_begins_has_none(tmp_path):
    """Without a store, or with an empty one, there is nothing to compare."""
    check_same_prompts(tmp_path / "store.sqlite", PROMPTS)
    Store(tmp_path).close()
    check_same_prompts(tmp_path / "store.sqlite", PROMPTS)
