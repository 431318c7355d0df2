"""docs/promises.md#graded: a trajectory whose environment fails again and again takes its group out of
training, message by message."""

import asyncio
from pathlib import Path

import pytest

from helpers.control.script import Script, samples_of, scripted
from laminar_hpc.environments.turns.episode import TRIES
from laminar_hpc.environments.turns.episode import patient as is_patient
from laminar_hpc.environments.turns.session import EnvironmentHangs
from laminar_hpc.line.messages.rollouts import Drop, Grant, Lost
from laminar_hpc.policies import filtering
from laminar_hpc.rollout.episodes import Episodes
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.in_flight import granted as of_grant


def working(tmp_path: Path, prompts: int = 4) -> tuple[Script, list[Grant]]:
    """Two replicas with two groups of two each."""
    script = scripted(tmp_path, steps=4, prompts=prompts, local_batch_groups=2)
    return script, script.working(2)


def fails(script: Script, replica: int, trajectory_id: int, attempt: int) -> None:
    script.hear("rollout", replica, Lost(trajectory_id, attempt, "no shelf", ungraded=TRIES))


def test_its_group_is_given_up_and_its_number_is_free(tmp_path: Path) -> None:
    """Once it is tried again, elsewhere perhaps; then all samples of the group are taken from whoever has
    them, finished ones too, another group may be granted in its place, and the records are whole."""
    script, (first, second) = working(tmp_path)
    lost, other, *_ = samples_of(first)
    tracker = script.controller.tracker
    group_id, counted = first.groups[0].group_id, tracker.counted
    fails(script, 0, lost, 0)
    assert group_id in tracker.groups and tracker.groups[group_id].samples[lost].is_open
    script.asks(1, 0, newest_batch=second.batch_id)
    again = script.granted(1)
    assert again is not None and samples_of(again).get(lost) == 1
    fails(script, 1, lost, 1)
    assert group_id not in tracker.groups and tracker.counted == counted + len(again.groups) - 2
    (drop,) = script.sent(0, Drop)
    assert isinstance(drop, Drop) and [(s.trajectory_id, s.attempt) for s in drop.samples] == [(other, 0)]
    script.hear("rollout", 0, Lost(other, 0, "late"))
    assert script.state().refused == 1 and not script.state().failure
    rows = script.controller.store._db.execute("SELECT state, reason FROM groups WHERE id = ?", (group_id,))
    assert rows.fetchone() == ("given_up", f"{filtering.UNGRADED}: no shelf")
    script.ends_clean()


def test_what_is_merely_slow_has_all_of_its_time(tmp_path: Path) -> None:
    """docs/promises.md#all-awaited: towards the end of a local batch each replica tries once, and the
    third try has all of environment.timeout_seconds for each call, at whichever replica it is."""
    script, (first, second) = working(tmp_path)
    lost, *_ = samples_of(first)
    patient, granted = list[bool](), first
    episodes = Episodes.__new__(Episodes)

    async def is_slow(work: TrajectoryInFlight, _: object) -> Outcome:
        patient.append(is_patient(work.failures + 1))
        raise EnvironmentHangs("submit did not return in time")

    episodes._episode = is_slow  # type: ignore[method-assign]
    for replica, attempt in ((0, 0), (1, 1), (0, 2)):
        (work,) = [work for work in of_grant(granted) if work.trajectory_id == lost]
        outcome = asyncio.run(episodes.run(work, None, lambda: False))  # type: ignore[arg-type]
        assert outcome.lost is not None and (work.attempt, outcome.ungraded) == (attempt, 1)
        script.hear("rollout", replica, Lost(lost, attempt, outcome.lost, ungraded=outcome.ungraded))
        if attempt < 2:
            newest = (first if replica else second).batch_id
            script.asks(1 - replica, 0, newest_batch=newest)
            found = script.granted(1 - replica)
            assert found is not None
            granted = found
    assert patient == [False, False, True]
    script.closes()


@pytest.mark.parametrize("in_a_row, ends", [(3, False), (4, True)])
def test_how_many_are_too_many(in_a_row: int, ends: bool) -> None:
    """A whole batch of groups in a row: then the run ends in one line."""
    assert filtering.environments_fail(in_a_row, 4) == ends


def test_a_grade_that_fails_is_one_of_many(tmp_path: Path) -> None:
    """A get_reward that fails is one failure, not as many as a replica's tries: the group lives on."""
    script, (first, _) = working(tmp_path)
    lost, *_ = samples_of(first)
    tracker, group_id = script.controller.tracker, first.groups[0].group_id
    assert filtering.UNGRADED_LIMIT == 2 * TRIES
    for attempt in range(filtering.UNGRADED_LIMIT):
        sample = tracker.groups[group_id].samples[lost]
        assert (sample.attempt, sample.ungraded) == (attempt, attempt)
        script.hear("rollout", 0, Lost(lost, attempt, "no grade", ungraded=1))
        if attempt + 1 < filtering.UNGRADED_LIMIT:
            assert sample.is_open and tracker.owners.move(lost, attempt, 0, 0)
    assert group_id not in tracker.groups
    script.closes()
