"""Groups in the tracker that are filtered or sampled in rounds: what is granted, given back, recorded, and
found again after a restart."""

import sqlite3

from helpers.made import trajectory
from laminar_hpc.controller.trajectories.tracker import Counts, TrajectoryTracker
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.store.store import Store

PAIR = GroupSize(2, 1, 2)
PROMPTS = [Prompt(f"{i}+1=", [i], {"n": i}) for i in range(5)]


def new_tracker(tmp_path, size=PAIR, filters=False):
    store = Store(tmp_path)
    tracker = TrajectoryTracker(store, PROMPTS, size, lambda draw: draw % 5, filters)
    tracker.recover()
    return store, tracker


def draw(tracker, quota=1, most=1, step=0, **rules):
    return tracker.draw(most, quota, replica=0, weight_id=step, weight_step=step, now=0.0, **rules)


def score(tracker, group, rewards, step=0):
    """Generates and scores the samples of a grant; gives what the last score led to."""
    for sample, reward in zip(group.samples, rewards, strict=True):
        tracker.generated(trajectory(group, sample, weight_id=step, step=step), step)
        outcome = tracker.scored(sample.trajectory_id, sample.attempt, reward, {}, "", 3.0)
    return outcome


def test_a_group_of_equal_rewards_is_given_up_and_its_number_given_back(tmp_path):
    """Never trained, on record with its reason, and another prompt is drawn; one with an advantage is
    kept."""
    store, tracker = new_tracker(tmp_path, filters=True)
    (group,) = draw(tracker)
    given_up = score(tracker, group, [1.0, 1.0])
    assert given_up is not None and not given_up.finished
    assert (
        tracker.counted == 0
        and tracker.groups == {}
        and len(tracker.groups.live) == 0
        and tracker.filtered_in_a_row == 1
    )
    (other,) = draw(tracker)
    assert other.group_id == 1 and other.row == {"n": 1} and tracker.groups[1].number == 1
    kept = score(tracker, other, [0.0, 1.0])
    assert kept is not None and kept.finished and tracker.counted == 1 and tracker.filtered_in_a_row == 0
    assert (
        tracker.counts.take() == Counts(groups_filtered=1, tokens_generated=12)
        and tracker.counts.take() == Counts()
    )
    store.commit()
    database = sqlite3.connect(store.path)
    assert database.execute("SELECT state, reason FROM groups ORDER BY id").fetchall() == [
        ("given_up", "all 2 rewards are 1"),
        ("finished", None),
    ]
    kept = database.execute(
        "SELECT state, COUNT(file) FROM trajectories JOIN responses ON trajectory_id = id "
        "WHERE group_id = 0 GROUP BY state"
    ).fetchall()
    assert kept == [("given_up", 2)]
    database.close()
    store.close()
    store, tracker = new_tracker(tmp_path, filters=True)
    assert list(tracker.groups) == [1] and tracker.counted == 1, "a restart brings no given-up group back"
    store.close()


def test_without_the_setting_equal_rewards_are_trained(tmp_path):
    """zero_variance=keep gives no group up."""
    store, tracker = new_tracker(tmp_path)
    (group,) = draw(tracker)
    kept = score(tracker, group, [0.0, 0.0])
    assert (
        kept is not None
        and kept.finished
        and [t.reward for sent in tracker.consume([0], 0) for t in sent.trajectories] == [0.0, 0.0]
    )
    store.close()


def test_a_group_that_is_all_wrong_gets_more_samples(tmp_path):
    """Two first, one more at a time up to four; later rounds on newer weights; the group's age stays that of
    its first samples."""
    store, tracker = new_tracker(tmp_path, GroupSize(2, 1, 4))
    (group,) = draw(tracker)
    assert len(group.samples) == 2
    assert score(tracker, group, [0.0, 0.0]) is None and not tracker.groups[0].finished
    (more,) = draw(tracker, quota=0, step=2)
    assert (
        more.group_id == 0
        and [s.trajectory_id for s in more.samples] == [2]
        and tracker.groups[0].view().weight_step == 0
    )
    assert score(tracker, more, [0.0], step=2) is None
    (last,) = draw(tracker, quota=0, step=2)
    complete = score(tracker, last, [1.0], step=2)
    assert complete is not None and complete.finished and tracker.groups[0].view().weight_step == 0
    batch = [t for sent in tracker.consume([0], 2) for t in sent.trajectories]
    assert [t.reward for t in batch] == [0.0, 0.0, 0.0, 1.0] and [t.weight_step for t in batch] == [
        0,
        0,
        2,
        2,
    ]
    assert tracker.counts == Counts(tokens_generated=12)
    (right,) = draw(tracker)
    assert score(tracker, right, [0.0, 1.0]) is not None
    assert tracker.counts.take() == Counts(tokens_generated=18, samples_saved=2, tokens_saved=6.0)
    store.close()


def test_rounds_and_filter_together(tmp_path):
    """A group is given up only once it has had all its samples."""
    store, tracker = new_tracker(tmp_path, GroupSize(2, 2, 4), filters=True)
    (group,) = draw(tracker)
    assert score(tracker, group, [0.0, 0.0]) is None and tracker.counted == 1
    (more,) = draw(tracker, quota=0)
    given_up = score(tracker, more, [0.0, 0.0])
    assert (
        given_up is not None and not given_up.finished and len(given_up.samples) == 4 and tracker.counted == 0
    )
    store.close()


def test_a_restart_between_rounds(tmp_path):
    """The scores of the first round are known again: the second goes on, and decides with them."""
    store, tracker = new_tracker(tmp_path, GroupSize(2, 1, 4))
    (group,) = draw(tracker)
    score(tracker, group, [0.0, 0.0])
    store.commit()
    store.close()
    store, tracker = new_tracker(tmp_path, GroupSize(2, 1, 4))
    (more,) = draw(tracker, quota=0)
    assert [s.trajectory_id for s in more.samples] == [2]
    complete = score(tracker, more, [1.0])
    assert complete is not None and complete.finished and tracker.counts.samples_saved == 1
    store.close()


def test_what_is_ready_for_a_replica(tmp_path):
    """Samples with nobody count by the share of a group that they are; whether scores of the replica's own
    work are pending is known."""
    store, tracker = new_tracker(tmp_path, GroupSize(2, 1, 4))
    (group,) = draw(tracker)
    assert tracker.open_in_groups == 0.0 and not tracker.groups.holders.scores(0)
    first, second = group.samples
    tracker.generated(trajectory(group, first), 0)
    tracker.scored(first.trajectory_id, 0, 0.0, {}, "", 0.0)
    tracker.generated(trajectory(group, second), 0)
    assert (
        tracker.open_in_groups == 0.0
        and tracker.groups.holders.scores(0)
        and not tracker.groups.holders.scores(1)
    )
    tracker.scored(second.trajectory_id, 0, 0.0, {}, "", 0.0)
    assert tracker.open_in_groups == 0.5 and not tracker.groups.holders.scores(0)
    store.close()


def test_a_local_batch_is_filled_by_samples(tmp_path):
    """Later rounds take the place of new groups by their samples, oldest groups first, and go only where
    `may_go_on` lets them."""
    store, tracker = new_tracker(tmp_path, GroupSize(2, 1, 4))
    groups = draw(tracker, quota=3, most=3)
    for group in groups:
        score(tracker, group, [0.0, 0.0])
    refused = draw(tracker, quota=0, most=2, may_go_on=lambda view: view.group_id == 0)
    assert [g.group_id for g in refused] == [0]
    batch = draw(tracker, quota=9, most=2)
    assert [(g.group_id, len(g.samples)) for g in batch] == [(1, 1), (2, 1), (3, 2)]
    store.close()
