"""Trainers that start again while all else goes on: store and memory go back to their step together, and
nothing is lost or trained twice on the way to the present weights."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.made import trajectory
from laminar_hpc.controller.trajectories.groups import SampleState
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.policies import admission
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.store.store import Store

PROMPTS = [Prompt(f"{i}+1=", [i], {"n": i}) for i in range(5)]
PER_STEP = 2


class Life(RuleBasedStateMachine):
    """`history`: what each step that led to the present weights was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(self.folder)
        self.tracker = self.started()
        self.history: dict[int, list[int]] = {}
        self.step, self.drawn, self.weight_id = 0, set[int](), 0
        self.owed: dict[int, PromptGroup] = {}

    def started(self) -> TrajectoryTracker:
        tracker = TrajectoryTracker(self.store, PROMPTS, GroupSize(2, 1, 2), lambda draw: draw % 5)
        tracker.recover()
        return tracker

    def unfinished(self, generated: bool) -> list[tuple[int, int, SampleState]]:
        return [
            (group.group_id, i, sample)
            for group in self.tracker.groups.values()
            for i, sample in group.samples.items()
            if sample.replica is not None
            and not sample.finished
            and (sample.generated is not None) == generated
        ]

    # ---- what happens --------------------------------------------------------------------------------------

    @rule(groups=st.integers(1, 3), older=st.integers(0, 2))
    def grant(self, groups: int, older: int) -> None:
        self.weight_id += 1
        step = max(0, self.step - older)
        drawn = self.tracker.draw(groups, groups, self.weight_id % 3, self.weight_id, step, now=0.0)
        self.owed |= {group.group_id: group for group in drawn}
        self.drawn |= {group.group_id for group in drawn}

    @precondition(lambda self: self.unfinished(generated=False))
    @rule(data=st.data(), scored=st.booleans())
    def generate(self, data: st.DataObject, scored: bool) -> None:
        group, i, sample = data.draw(st.sampled_from(self.unfinished(generated=False)))
        response = trajectory(self.owed[group], Sample(i, sample.attempt), step=sample.weight_step)
        assert self.tracker.generated(response, self.step)
        if scored:
            self.tracker.scored(i, sample.attempt, 1.0, {"accuracy": 1.0}, "", 3.0)

    @precondition(lambda self: self.unfinished(generated=True))
    @rule(data=st.data(), lost=st.booleans())
    def score_or_lose(self, data: st.DataObject, lost: bool) -> None:
        _, i, sample = data.draw(st.sampled_from(self.unfinished(generated=True)))
        if lost:
            assert self.tracker.lost(i, sample.attempt)
        else:
            self.tracker.scored(i, sample.attempt, 0.5, {"accuracy": 0.0}, "", 3.0)

    @precondition(lambda self: self.tracker.ready_groups >= PER_STEP and self.step not in self.history)
    @rule(ends=st.booleans())
    def train(self, ends: bool) -> None:
        """With `ends` False the batch goes out and the step is never done."""
        chosen = admission.choose(self.step, self.tracker.groups.live, PER_STEP, None).group_ids
        payloads = self.tracker.consume(sorted(chosen), self.step)
        assert len(payloads) == 2 * PER_STEP, "a trajectory has lost its tokens"
        self.history[self.step] = sorted(chosen)
        self.step += ends

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.step))
        before = {
            i: (s.replica, s.attempt, s.generated) for g in (False, True) for _, i, s in self.unfinished(g)
        }
        back = [group for trained, groups in self.history.items() if trained >= step for group in groups]
        draws, finished = self.tracker.upcoming.used, self.tracker._finished_count
        assert self.tracker.restore(step) == len(back)
        after = {
            i: (s.replica, s.attempt, s.generated) for g in (False, True) for _, i, s in self.unfinished(g)
        }
        assert before == after, "work in progress has changed"
        assert all(self.tracker.groups[group].finished for group in back)
        assert (draws, finished) == (self.tracker.upcoming.used, self.tracker._finished_count)
        self.history = {trained: groups for trained, groups in self.history.items() if trained < step}
        self.step = step

    @rule()
    def controller_starts_again(self) -> None:
        self.tracker = self.started()

    # ---- what holds ----------------------------------------------------------------------------------------

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        trained = [group for groups in self.history.values() for group in groups]
        assert len(set(trained)) == len(trained), "trained twice"
        assert {*trained, *self.tracker.groups} == self.drawn and not {*trained} & {*self.tracker.groups}
        for step, groups in self.history.items():
            assert self.store.rows.consumed_groups(step) == groups

    @invariant()
    def memory_is_what_the_store_holds(self) -> None:
        other, mine = self.started(), self.tracker
        assert (other.counted, other.ready_groups) == (mine.counted, mine.ready_groups)
        assert other.counted == len(self.drawn)
        assert {g.group_id: g.view() for g in other.groups.values()} == {
            g.group_id: g.view() for g in mine.groups.values()
        }
        assert said(other) == said(mine)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


def said(tracker: TrajectoryTracker) -> dict[int, tuple]:
    """All of a trajectory that the store must know."""
    return {
        i: (s.attempt, s.finished, s.reward, s.accuracy, s.length)
        for group in tracker.groups.values()
        for i, s in group.samples.items()
    }


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
