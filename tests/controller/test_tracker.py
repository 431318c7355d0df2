"""The controller's memory and store: attempts guard each trajectory, nothing finished is lost or trained
twice, restores go back."""

import pytest

from helpers.made import trajectory
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.rollouts import Lost
from laminar_hpc.policies.filtering import UNGRADED_LIMIT
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.store import old_steps
from laminar_hpc.store.store import Store


def new_tracker(tmp_path, filters=False):
    store = Store(tmp_path)
    prompts = [Prompt(f"{i}+1=", [i], {"n": i}) for i in range(5)]
    tracker = TrajectoryTracker(store, prompts, GroupSize(2, 1, 2), lambda draw: draw % 5, filters)
    tracker.recover()
    return store, tracker


def finish(tracker, group, trainer_step=0):
    for sample in group.samples:
        tracker.generated(trajectory(group, sample), trainer_step)
        tracker.scored(sample.trajectory_id, sample.attempt, 1.0, {"accuracy": 1.0}, "", 3.0)


def test_a_group_is_finished_with_its_last_score_and_stamped_with_the_step(tmp_path):
    """A trajectory carries the trainer step of its last token."""
    store, tracker = new_tracker(tmp_path)
    (group,) = tracker.draw(1, 5, replica=0, weight_id=0, weight_step=0, now=0.0)
    first, second = group.samples
    tracker.generated(trajectory(group, first), 3)
    assert not tracker.scored(first.trajectory_id, 0, 1.0, {}, "", 3.0)
    assert not tracker.scored(second.trajectory_id, 0, 1.0, {}, "", 3.0), (
        "a score before its trajectory counts for nothing"
    )
    tracker.generated(trajectory(group, second), 4)
    complete = tracker.scored(second.trajectory_id, 0, 0.0, {}, "", 3.0)
    assert complete is not None and complete.finished
    batch = [t for sent in tracker.consume([group.group_id], 5) for t in sent.trajectories]
    assert [t.step_finished for t in batch] == [3, 4] and [t.reward for t in batch] == [1.0, 0.0]
    assert tracker.groups == {}
    store.close()


def test_reports_of_old_attempts_are_refused(tmp_path):
    """docs/promises.md#nothing-lost: a process that wakes up late can do no harm."""
    store, tracker = new_tracker(tmp_path)
    (group,) = tracker.draw(1, 5, replica=0, weight_id=0, weight_step=0, now=0.0)
    gone = tracker.groups.holders.generating(0)
    for _, trajectory_id, sample in gone:
        tracker.owners.discard(trajectory_id, sample.attempt, tokens=3)
    assert len(gone) == 2 and tracker.counts.tokens_discarded == 6
    (again,) = tracker.draw(3, 0, replica=1, weight_id=1, weight_step=1, now=0.0)
    assert [s.attempt for s in again.samples] == [1, 1] and again.group_id == group.group_id
    finish(tracker, group)
    assert tracker.counts.reports_refused == 4 and not tracker.groups[group.group_id].finished
    finish(tracker, again)
    finish(tracker, again)  # twice reported counts once
    assert tracker.groups[group.group_id].finished and tracker.counts.reports_refused == 8
    assert tracker.counted == 1, "a redone group keeps its admission number"
    store.close()


@pytest.mark.parametrize("kill", [False, True])
def test_restore_brings_back_what_later_steps_trained_on(tmp_path, kill):
    """docs/promises.md#nothing-lost, over a resume: consumed after the checkpoint -> finished; in
    progress -> from its prompt; ids and prompt order go on."""
    store, tracker = new_tracker(tmp_path)
    groups = tracker.draw(3, 3, replica=0, weight_id=0, weight_step=0, now=0.0)
    for group in groups[:2]:
        finish(tracker, group)
    tracker.consume([groups[0].group_id], 0)
    tracker.consume([groups[1].group_id], 1)
    store.commit()
    if kill:  # as a power cut leaves it: what was not committed is gone
        tracker.draw(1, 1, replica=0, weight_id=0, weight_step=0, now=0.0)
        store._db.close()
    else:
        store.close()
    store = Store(tmp_path)
    tracker = TrajectoryTracker(store, tracker._prompts, GroupSize(2, 1, 2), lambda draw: draw % 5)
    tracker.recover()
    tracker.restore(1)
    assert store.rows.consumed_groups(0) == [groups[0].group_id] and store.rows.consumed_groups(1) == []
    assert [g.group_id for g in tracker.groups.values() if g.finished] == [groups[1].group_id]
    lost, new = tracker.draw(2, 1, replica=0, weight_id=5, weight_step=1, now=0.0)
    assert lost.group_id == groups[2].group_id and [s.attempt for s in lost.samples] == [1, 1]
    assert new.group_id == 3 and new.row == {"n": 3} and tracker.counted == 4
    assert {s.trajectory_id for s in new.samples}.isdisjoint(
        {s.trajectory_id for g in groups for s in g.samples}
    )
    store.close()


def test_a_lost_member_is_redone_alone(tmp_path):
    """The finished samples of its group are kept."""
    store, tracker = new_tracker(tmp_path)
    (group,) = tracker.draw(1, 1, replica=0, weight_id=0, weight_step=0, now=0.0)
    first, second = group.samples
    tracker.generated(trajectory(group, first), 0)
    tracker.scored(first.trajectory_id, 0, 1.0, {}, "", 0.0)
    tracker.lost(second.trajectory_id, 0)
    (again,) = tracker.draw(1, 0, replica=0, weight_id=3, weight_step=2, now=0.0)
    assert [s.trajectory_id for s in again.samples] == [second.trajectory_id]
    assert tracker.groups[group.group_id].view().weight_step == 0, (
        "the group's age is that of its oldest trajectory"
    )
    store.close()


def test_a_filtered_group_had_its_grades(tmp_path):
    """Groups that fail between groups of equal rewards do not end the run as a batch of failures in a row:
    the environment works."""
    store, tracker = new_tracker(tmp_path, filters=True)
    bad, equal, worse = tracker.draw(3, 3, replica=0, weight_id=0, weight_step=0, now=0.0)

    def fail(group):
        (sample, _) = group.samples
        return tracker.ungraded(Lost(sample.trajectory_id, 0, "no", ungraded=UNGRADED_LIMIT), 0.0)

    assert fail(bad) is not None and tracker.ungraded_in_a_row == 1
    finish(tracker, equal)
    assert tracker.counts.groups_filtered == 1 and tracker.ungraded_in_a_row == 0
    assert fail(worse) is not None and tracker.ungraded_in_a_row == 1
    store.close()


def test_rows_of_groups_without_grades_are_let_go(tmp_path, monkeypatch):
    """docs/promises.md#graded: trajectories that were given up before they had a response have neither
    length nor digest, and leave the store with the others."""
    monkeypatch.setattr(old_steps, "ROWS_MAX", 0)
    store, tracker = new_tracker(tmp_path)
    bad, good = tracker.draw(2, 2, replica=0, weight_id=0, weight_step=0, now=0.0)
    (sample, other) = bad.samples
    tracker.generated(trajectory(bad, other), 0)
    tracker.ungraded(Lost(sample.trajectory_id, 0, "no", ungraded=UNGRADED_LIMIT), 0.0)
    finish(tracker, good)
    tracker.consume([good.group_id], 0)
    while store.old_steps.trim(1):
        pass
    assert store.old_steps.rows() == 0
    assert [store.old_steps.sums(step)[:2] for step in (0, old_steps.GIVEN_UP)] == [(2, 6), (2, 3)]
    store.close()
