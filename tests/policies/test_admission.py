"""The staleness bound: whatever the order in which groups finish, none is trained later than the bound allows, and nobody starves."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policies.admission import GroupView, choose, quota


@settings(max_examples=300, deadline=None)
@given(
    groups_per_step=st.integers(1, 5),
    bound=st.integers(0, 4),
    replicas=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_bound_holds_for_any_order_of_events(groups_per_step, bound, replicas, seed):
    """Promise 2 and the proof in policies/admission.py: replicas on any old weights, any order of finishing, groups given up and redone."""
    random_ = random.Random(seed)
    steps, trained = 25, 0
    counted = finish_order = next_id = 0
    weights = [0] * replicas
    groups: dict[int, GroupView] = {}
    idle_turns = 0
    while trained < steps:
        progress = False
        action = random_.random()
        if action < 0.35:  # a replica refreshes or not, then asks
            replica = random_.randrange(replicas)
            weights[replica] = random_.randint(weights[replica], trained)
            allowed = quota(weights[replica], counted, groups_per_step, steps, bound)
            for _ in range(min(allowed, random_.randint(1, groups_per_step))):
                counted += 1
                groups[next_id] = GroupView(next_id, counted, weights[replica], finished=False)
                next_id += 1
                progress = True
        elif action < 0.7 and any(not g.finished for g in groups.values()):
            group = random_.choice([g for g in groups.values() if not g.finished])
            if random_.random() < 0.05:  # given up: its number goes back
                del groups[group.group_id]
                counted -= 1
            elif random_.random() < 0.05:  # lost and redone on newer weights
                newer = random_.randint(group.weight_step, trained)
                groups[group.group_id] = GroupView(group.group_id, group.number, newer, finished=False)
            else:
                finish_order += 1
                groups[group.group_id] = GroupView(group.group_id, group.number, group.weight_step, True, finish_order)
            progress = True
        else:
            choice = choose(trained, groups.values(), groups_per_step, bound)
            if choice.group_ids:
                assert len(choice.group_ids) == groups_per_step
                for group_id in choice.group_ids:
                    assert trained - groups.pop(group_id).weight_step <= bound
                trained += 1
                progress = True
        idle_turns = 0 if progress else idle_turns + 1
        if idle_turns > 200:  # nobody could move for long: see whether anybody can at all
            weights = [trained] * replicas
            can_finish = any(not g.finished for g in groups.values())
            assert (
                can_finish
                or quota(trained, counted, groups_per_step, steps, bound) > 0
                or choose(trained, groups.values(), groups_per_step, bound).group_ids
            )
            idle_turns = 0


def test_grant_order_alone_would_break_the_bound():
    """The case in the module's docstring: a younger finished group must wait when two older ones are due at the next step."""
    old = [GroupView(1, 2, 0, finished=False), GroupView(2, 3, 0, finished=False)]
    young = GroupView(3, 4, 1, finished=True, finish_order=2)
    assert choose(1, [*old, young], 1, 2).group_ids == []
    assert choose(1, [GroupView(1, 2, 0, True, 3), old[1], young], 1, 2).group_ids == [1]


def test_sync_grants_one_batch_per_version():
    """max_staleness=0: exactly the groups of the current step, none of the next."""
    assert quota(0, 0, 32, 100, 0) == 32
    assert quota(0, 32, 32, 100, 0) == 0
    assert quota(1, 32, 32, 100, 0) == 32


def test_no_more_groups_than_the_run_trains():
    assert quota(9, 300, 32, 10, 2) == 20
    assert quota(9, 320, 32, 10, None) == 0


def test_without_a_bound_first_finished_is_first_trained():
    groups = [GroupView(1, 1, 0, True, 7), GroupView(2, 2, 5, True, 3), GroupView(3, 3, 5, False)]
    assert choose(6, groups, 1, None).group_ids == [2]
