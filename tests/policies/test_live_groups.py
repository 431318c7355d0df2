"""The rules decide by counts what a pass over all groups would decide."""

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.control.plain_admission import plain_choice, plain_may_go_on
from laminar_hpc.policies.admission import choose, may_go_on
from laminar_hpc.policies.live_groups import GroupView, LiveGroups

VIEWS = st.builds(
    GroupView,
    group_id=st.integers(0, 12),
    number=st.integers(1, 5),  # given-up groups give theirs back: two may have the same
    weight_step=st.integers(0, 4),
    finished=st.booleans(),
    finish_order=st.integers(0, 5),
)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(VIEWS | st.integers(0, 12), max_size=40),
    step=st.integers(0, 5),
    groups_per_step=st.integers(1, 4),
    bound=st.none() | st.integers(0, 3),
    data=st.data(),
)
def test_counts_decide_as_a_pass_over_all_groups(changes, step, groups_per_step, bound, data):
    """docs/promises.md#turns: after any history of groups that come, change and go, `choose` takes the
    same groups in the same order and waits in the same cases, and `may_go_on` allows the same; what it
    refuses to one group it refuses to all that are due later."""
    live, groups = LiveGroups(), dict[int, GroupView]()
    for change in changes:
        if isinstance(change, GroupView):
            live.put(change)
            groups[change.group_id] = change
        elif groups.pop(change, None):
            live.remove(change)
    views = list(groups.values())
    assert len(live) == len(views) and live.finished == sum(view.finished for view in views)
    size = data.draw(st.integers(1, groups_per_step))
    taken = data.draw(st.integers(0, groups_per_step - size))
    choice = choose(step, live, groups_per_step, bound, taken, size)
    assert choice.group_ids == plain_choice(step, views, groups_per_step, bound, taken, size)
    assert bool(choice.reason) != bool(choice.group_ids)
    for weights in range(5):
        refused = 100
        for view in sorted(views, key=lambda view: view.weight_step):
            allowed = may_go_on(view, weights, step, live, groups_per_step, bound, taken)
            assert allowed == plain_may_go_on(view, weights, step, views, groups_per_step, bound, taken)
            assert not (allowed and refused < view.weight_step)
            refused = refused if allowed else min(refused, view.weight_step)
