"""What is kept beside the groups says what a pass over all of them would say."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made import trajectory
from laminar_hpc.controller.trajectories.groups import Group, SampleState
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.policies.sampling import GroupSize
from laminar_hpc.store.store import Store

PROMPTS = [Prompt(f"{i}+1=", [i], {"n": i}) for i in range(5)]
OFTEN = ("draw", "generate", "generate", "score")
SOMETIMES = ("lose", "hold", "discard", "move", "adopt", "scorer lost", "score there", "scores")
SELDOM = ("consume", "restore", "start again")
EVENTS = st.sampled_from(OFTEN) | st.sampled_from(SOMETIMES) | st.sampled_from(OFTEN + SELDOM)


class History:
    """A tracker to which things happen, in turn chosen by numbers."""

    def __init__(self, store: Store) -> None:
        self.store, self.step = store, 0
        self.tracker = self.started()

    def started(self) -> TrajectoryTracker:
        tracker = TrajectoryTracker(self.store, PROMPTS, GroupSize(2, 1, 3), lambda draw: draw % 5, True)
        tracker.recover()
        return tracker

    def samples(self, number: int, wanted: str) -> list[tuple[Group, int, SampleState]]:
        """One that is in this state, if any."""
        found = [
            (group, i, sample)
            for group in self.tracker.groups.values()
            for i, sample in group.samples.items()
            if state_of(sample) == wanted
        ]
        return [found[number % len(found)]] if found else []

    def happens(self, event: str, number: int) -> None:
        tracker, replica = self.tracker, number % 3
        if event == "draw":
            older = max(0, self.step - number % 2)
            tracker.draw(2, number % 3, replica, 0, older, 0.0, lambda group: group.weight_step % 3 < 2)
        elif event == "consume" and tracker.ready_groups:
            tracker.consume(sorted(tracker.groups.live.first(1)), self.step)
            self.step += 1
        elif event == "restore":
            self.step = number % (self.step + 1)
            tracker.restore(self.step)
        elif event == "start again":
            self.tracker = self.started()
            if number % 2:
                self.tracker.keep_owners()
        elif event == "scores":
            tracker.owners.scores(replica, [])
        elif event in ("score", "scorer lost"):
            for _, i, sample in self.samples(number, "scoring"):
                if event == "score":
                    tracker.scored(i, sample.attempt, float(number % 2), {}, "", 3.0)
                elif sample.replica is not None:
                    tracker.owners.scorer_lost(i)
        elif event == "score there":
            for i in list(tracker.owners.unscored)[:1]:
                tracker.owners.score_at(i, replica)
        elif event == "adopt":
            for _, i, sample in self.samples(number, "open"):
                tracker.owners.adopt(i, sample.attempt, replica)
        else:
            self.with_one_under_way(event, number)

    def with_one_under_way(self, event: str, number: int) -> None:
        for group, i, sample in self.samples(number, "held" if number % 4 == 0 else "generating"):
            if event == "generate":
                bare = PromptGroup(group.group_id, [1], "", {}, [])
                self.tracker.generated(trajectory(bare, Sample(i, sample.attempt)), self.step)
            elif event == "lose":
                self.tracker.lost(i, sample.attempt)
            elif event == "hold":
                self.tracker.owners.hold(i)
            elif event == "discard":
                self.tracker.owners.discard(i, sample.attempt, 1)
            elif event == "move":
                self.tracker.owners.move(i, sample.attempt, number % 3, 0)


def state_of(sample: SampleState) -> str:
    if sample.finished:
        return "finished"
    if sample.generated:
        return "scoring"
    if sample.replica is not None:
        return "generating"
    return "held" if sample.held else "open"


def check(tracker: TrajectoryTracker) -> None:
    holders, groups = tracker.groups.holders, list(tracker.groups.values())
    every = [(g, i, s) for g in groups if not g.finished for i, s in sorted(g.samples.items())]
    every.sort(key=lambda each: each[0].group_id)
    generating = {
        r: [e for e in every if state_of(e[2]) == "generating" and e[2].replica == r] for r in range(3)
    }
    assert holders.generating_counts() == {r: len(mine) for r, mine in generating.items() if mine}
    for replica, mine in generating.items():
        assert holders.generating(replica) == mine
        scoring = [i for _, i, s in every if s.generated and s.replica == replica]
        assert holders.scoring(replica) == scoring and holders.scores(replica) == bool(scoring)
    assert holders.unscored == sum(s.generated for _, _, s in every)
    opened = {g.group_id: sorted(i for i, s in g.samples.items() if s.is_open) for g in groups}
    waiting = sorted((g.view().weight_step, g.group_id) for g in groups if opened[g.group_id])
    assert holders.open_samples == sum(map(len, opened.values()))
    assert holders.oldest_open() == (waiting[0][1] if waiting else None)
    assert all(holders.open_of(group_id) == ids for group_id, ids in opened.items())
    views = [group.view() for group in groups]
    assert len(tracker.groups.live) == len(views) and tracker.ready_groups == sum(
        view.finished for view in views
    )
    steps = sorted({view.weight_step for view in views})
    at = {step: [view.finished for view in views if view.weight_step == step] for step in steps}
    assert list(tracker.groups.live.by_step()) == [(step, len(at[step]), sum(at[step])) for step in steps]


@settings(max_examples=20, deadline=None)
@given(events=st.lists(st.tuples(EVENTS, st.integers(0, 11)), max_size=60))
def test_what_is_kept_is_what_a_pass_over_all_groups_finds(events):
    """docs/promises.md#turns: whatever happens to trajectories, over restores and controllers too."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        history = History(store)
        for event, number in events:
            history.happens(event, number)
            check(history.tracker)
        store.close()
