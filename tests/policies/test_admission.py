"""The staleness bound: whatever the order in which groups finish, none is trained later than the bound
allows, and nobody starves."""

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policies.admission import choose, may_go_on, quota
from laminar_hpc.policies.live_groups import GroupView, LiveGroups
from laminar_hpc.policies.refill import held
from laminar_hpc.policies.staleness import StepBounds


class Groups(dict[int, GroupView]):
    """By id; `live` has the same."""

    def __init__(self) -> None:
        self.live = LiveGroups()

    def __setitem__(self, group_id: int, view: GroupView) -> None:
        super().__setitem__(group_id, view)
        self.live.put(view)

    def __delitem__(self, group_id: int) -> None:
        super().__delitem__(group_id)
        self.live.remove(group_id)

    def pop(self, group_id: int) -> GroupView:
        self.live.remove(group_id)
        return super().pop(group_id)


def live(groups: Iterable[GroupView]) -> LiveGroups:
    """These, in this order."""
    known = LiveGroups()
    for group in groups:
        known.put(group)
    return known


@settings(max_examples=300, deadline=None)
@given(
    groups_per_step=st.integers(1, 5),
    bound=st.integers(0, 4),
    replicas=st.integers(1, 4),
    filtered=st.sampled_from([0.0, 0.3, 0.9]),
    more_rounds=st.sampled_from([0.0, 0.5]),
    parts=st.integers(1, 3),
    several=st.booleans(),
    adapts=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_bound_holds_for_any_order_of_events(
    groups_per_step, bound, replicas, filtered, more_rounds, parts, several, adapts, seed
):
    """docs/promises.md#no-barrier and the proof in policies/admission.py: replicas on any old weights,
    any order of finishing, groups given up when they are complete, sampled in several rounds, lost and redone
    on other weights, steps that take their groups in several parts, and restores to an earlier step, out of
    the middle of one too. None is late, no group is taken twice, nobody starves. With `several` a replica
    asks on any of the weights that it holds beside those that it generates with; what is not trained is on
    the newest refill.held(bound) at all times. With `adapts` each step's weights have a bound of their own,
    of any size up to `bound`, and each trajectory is trained within that of its weights."""
    random_ = random.Random(seed)
    bounds = StepBounds(random_.randint(0, bound) if adapts else bound)
    steps, trained = 25, 0
    ends = [
        groups_per_step * (i + 1) // parts for i in range(parts)
    ]  # some parts are empty where a step has fewer groups than parts
    batch: list[GroupView] = []  # what the step under way has taken
    counted = finish_order = next_id = 0
    weights = [0] * replicas
    groups = Groups()
    idle: dict[
        int, bool
        # unfinished groups whose samples are with nobody -> whether all of them are, so that the age may rise
    ] = {}
    history: list[list[GroupView]] = []  # the batch of each step
    idle_turns = restores = 0

    def allowed(group, weight_step):
        return may_go_on(group, weight_step, trained, groups.live, groups_per_step, bounds, len(batch))

    def next_part():
        size = next(end for end in ends if end > len(batch)) - len(batch)
        return size, choose(trained, groups.live, groups_per_step, bounds, len(batch), size)

    def running():
        return [g for g in groups.values() if not g.finished and g.group_id not in idle]

    while trained < steps:
        progress = False
        action = random_.random()
        if action < 0.35:  # a replica refreshes or not, then asks
            replica = random_.randrange(replicas)
            weights[replica] = step = random_.randint(0 if several else weights[replica], trained)
            for group_id in sorted(idle, key=lambda i: groups[i].weight_step):
                if allowed(groups[group_id], step):
                    age = step if idle.pop(group_id) else min(step, groups[group_id].weight_step)
                    groups[group_id] = GroupView(group_id, groups[group_id].number, age, finished=False)
                    progress = True
            quota_left = quota(step, counted, groups_per_step, steps, bounds.at(step))
            for _ in range(min(quota_left, random_.randint(1, groups_per_step))):
                counted += 1
                groups[next_id] = GroupView(next_id, counted, step, finished=False)
                next_id += 1
                progress = True
        elif action < 0.7 and running():
            group = random_.choice(running())
            if random_.random() < 0.05:  # lost: redone on whatever weights there are
                idle[group.group_id] = True
            elif random_.random() < more_rounds:
                idle[group.group_id] = False
            elif random_.random() < filtered:  # given up: its number goes back
                del groups[group.group_id]
                counted -= 1
            else:
                finish_order += 1
                groups[group.group_id] = GroupView(
                    group.group_id, group.number, group.weight_step, True, finish_order
                )
            progress = True
        elif action < 0.71 and (trained or batch) and restores < 3:
            restores += 1  # what later steps trained on is finished again, work in progress is with nobody
            trained = random_.randint(max(0, trained - 4), trained)
            for group in [g for step in history[trained:] for g in step] + batch:
                groups[group.group_id] = group
            batch = []
            del history[trained:]
            idle |= {
                g.group_id: g.group_id not in idle or idle[g.group_id]
                for g in groups.values()
                if not g.finished
            }
            weights = [trained] * replicas
            progress = True
        else:
            size, choice = next_part()
            if choice.group_ids:
                assert len(choice.group_ids) == len(set(choice.group_ids)) == size
                batch += [groups.pop(group_id) for group_id in choice.group_ids]
                assert all(trained <= bounds.due(group.weight_step) and group.finished for group in batch)
                assert all(bounds.at(group.weight_step) <= bound for group in batch)
                progress = True
            if len(batch) == groups_per_step:
                history.append(batch)
                trained, batch = trained + 1, []
                if adapts:  # before there are weights of that step
                    bounds.decide(trained + 1, random_.randint(0, bound))
                assert all(trained + 1 - g.weight_step < held(bound) for g in groups.values())
        idle_turns = 0 if progress else idle_turns + 1
        if idle_turns > 200:  # nobody could move for long: see whether anybody can at all
            weights = [trained] * replicas
            assert (
                running()
                or any(allowed(groups[i], trained) for i in idle)
                or quota(trained, counted, groups_per_step, steps, bounds.at(trained)) > 0
                or next_part()[1].group_ids
            )
            idle_turns = 0


def test_older_weights_only_where_the_bound_allows():
    """Bound 1, one group per step, trainer at step 3: where a group is due at step 3 already, a lost one may
    not become due then too."""
    lost, other = GroupView(1, 5, 3, finished=False), GroupView(2, 4, 2, finished=True)
    both = live([lost, other])
    assert may_go_on(lost, 3, 3, both, 1, 1) and may_go_on(lost, 4, 3, both, 1, 1)
    assert not may_go_on(lost, 2, 3, both, 1, 1)
    assert may_go_on(lost, 2, 3, live([lost]), 1, 1) and may_go_on(lost, 0, 3, both, 1, None)


def test_grant_order_alone_would_break_the_bound():
    """The case in the module's docstring: a younger finished group must wait when two older ones are due at
    the next step."""
    old = [GroupView(1, 2, 0, finished=False), GroupView(2, 3, 0, finished=False)]
    young = GroupView(3, 4, 1, finished=True, finish_order=2)
    assert choose(1, live([*old, young]), 1, 2).group_ids == []
    assert choose(1, live([GroupView(1, 2, 0, True, 3), old[1], young]), 1, 2).group_ids == [1]


def test_sync_grants_one_batch_per_version():
    """max_staleness=0: exactly the groups of the current step, none of the next."""
    assert quota(0, 0, 32, 100, 0) == 32
    assert quota(0, 32, 32, 100, 0) == 0
    assert quota(1, 32, 32, 100, 0) == 32


def test_no_more_groups_than_the_run_trains():
    """Nothing is generated that no step will train on."""
    assert quota(9, 300, 32, 10, 2) == 20
    assert quota(9, 320, 32, 10, None) == 0


def test_without_a_bound_first_finished_is_first_trained():
    """max_staleness=null takes groups in the order in which they finished."""
    groups = [GroupView(1, 1, 0, True, 7), GroupView(2, 2, 5, True, 3), GroupView(3, 3, 5, False)]
    assert choose(6, live(groups), 1, None).group_ids == [2]


def test_a_part_of_a_step_leaves_room_for_the_rest_of_it():
    """Two groups a step, bound 0, one group a part: what the first part leaves may be the second's, but not
    once that is taken as well."""
    young, old = GroupView(1, 1, 0, finished=True), GroupView(2, 2, 0, finished=False)
    both = live([young, old])
    assert choose(0, both, 2, 0).group_ids == []
    assert choose(0, both, 2, 0, taken=0, size=1).group_ids == [1]
    assert choose(0, both, 2, 0, taken=1, size=1).group_ids == []
