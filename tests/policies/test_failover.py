"""Failover: a dead replica's trajectories go on with their own weights only, within the room, or back to
their prompts; none is lost."""

from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.policies.failover import Idle, Orphan, Reload, Room, plan_reloads, redirect

IDS = st.integers(0, 3)
ORPHANS = st.lists(st.tuples(IDS, st.integers(1, 50), st.integers(0, 50)), max_size=30).map(
    lambda rows: [
        Orphan(i, weight_id, prompt + response, response)
        for i, (weight_id, prompt, response) in enumerate(rows)
    ]
)
IDLE = st.lists(
    st.tuples(st.none() | IDS, st.frozensets(IDS), st.floats(0, 300), st.floats(0, 100)), max_size=6
).map(lambda rows: [Idle(i, *row) for i, row in enumerate(rows)])


@given(orphans=ORPHANS, rooms=st.lists(st.tuples(IDS, st.floats(0, 200)), max_size=8))
def test_orphans_go_to_their_own_weights_within_the_room(orphans, rooms):
    """As in Laminar: to a healthy replica on the same version."""
    free = {i: row[1] for i, row in enumerate(rooms)}
    for trajectory, replica in redirect(orphans, [Room(i, *row) for i, row in enumerate(rooms)], 1.0).items():
        assert rooms[replica][0] == orphans[trajectory].weight_id
        free[replica] -= orphans[trajectory].tokens + 1.0
    assert all(value > -1e-6 for value in free.values())


@given(
    orphans=ORPHANS,
    held=st.lists(st.tuples(st.frozensets(IDS, min_size=1), st.integers(0, 200)), max_size=6),
)
def test_a_replica_with_several_weights_has_its_room_once(orphans, held):
    """refresh=versions: an orphan goes to a replica that holds its id; what comes on one id takes the room of
    all; and who is left out fits nowhere that holds its id."""
    free = {i: float(room) for i, (_, room) in enumerate(held)}
    rooms = [Room(i, weight_id, free[i]) for i, (ids, _) in enumerate(held) for weight_id in sorted(ids)]
    placed = redirect(orphans, rooms)
    for trajectory, replica in placed.items():
        assert orphans[trajectory].weight_id in held[replica][0]
        free[replica] -= orphans[trajectory].tokens
    assert all(left >= 0 for left in free.values())
    for each in orphans:
        able = [i for i, (ids, _) in enumerate(held) if each.weight_id in ids]
        assert each.trajectory_id in placed or all(free[i] < each.tokens for i in able)


@given(orphans=ORPHANS, idle=IDLE)
def test_a_replica_without_work_loads_what_it_can_and_nobody_is_forgotten(orphans, idle):
    """docs/promises.md#one-policy and #nothing-lost: one id per replica, and one that it serves or can
    load; every trajectory in one place at most; a load saves more
    than it costs; and nothing waits where a replica that asks for work goes away with nothing."""
    reloads, again = plan_reloads(orphans, idle, 1.0)
    placed = [i for each in reloads for i in each.trajectory_ids]
    assert len(set(placed + again)) == len(placed + again)
    assert len({each.replica for each in reloads}) == len(reloads)
    for each in reloads:
        replica, mine = idle[each.replica], [orphans[i] for i in each.trajectory_ids]
        assert mine and {orphan.weight_id for orphan in mine} == {each.weight_id}
        assert each.weight_id == replica.weight_id or each.weight_id in replica.loadable
        assert sum(orphan.tokens + 1.0 for orphan in mine) <= replica.kv_tokens_free + 1e-6
        assert sum(orphan.response_tokens for orphan in mine) >= replica.price(each.weight_id)
    asks_in_vain = {each.replica for each in idle if each.weight_id is not None} - {
        each.replica for each in reloads
    }
    left = {orphan.trajectory_id for orphan in orphans} - set(placed)
    assert set(again) == (left if asks_in_vain else set())
    assert plan_reloads(list(reversed(orphans)), list(reversed(idle)), 1.0) == (reloads, again)


def orphan(i: int, weight_id: int, tokens: int) -> Orphan:
    return Orphan(i, weight_id, tokens + 10, tokens)


def test_who_asks_comes_before_who_is_starting_and_the_cheapest_first():
    """The replica whose reload costs least takes the work."""
    mine, both = [orphan(0, 5, 100), orphan(1, 5, 50)], frozenset({5, 6})
    asks, serves, starts = (
        Idle(1, 6, both, 1e3, 10.0),
        Idle(2, 5, both, 1e3, 10.0),
        Idle(3, None, both, 1e3, 10.0),
    )
    assert plan_reloads(mine, [asks, serves, starts]) == ([Reload(2, 5, [0, 1])], [])
    assert plan_reloads(mine, [asks, starts]) == ([Reload(1, 5, [0, 1])], [])
    assert plan_reloads(mine, [starts]) == ([Reload(3, 5, [0, 1])], [])


def test_what_is_not_worth_its_loads_starts_again():
    """There and back is two reloads; one that is starting loads something anyway."""
    mine, ids = [orphan(0, 5, 100), orphan(1, 5, 50)], frozenset({5, 6})
    assert plan_reloads(mine, [Idle(1, 6, ids, 1e3, 75.0)]) == ([Reload(1, 5, [0, 1])], [])
    assert plan_reloads(mine, [Idle(1, 6, ids, 1e3, 76.0)]) == ([], [0, 1])
    assert plan_reloads(mine, [Idle(1, 6, ids, 1e3, 76.0), Idle(3, None, ids, 1e3, 76.0)]) == (
        [Reload(3, 5, [0, 1])],
        [],
    )


def test_who_waits_and_for_what():
    """While all are at work there is time; a slot that is gone is no reason to wait."""
    mine = [orphan(0, 5, 100), orphan(1, 4, 50)]
    assert plan_reloads(mine, []) == ([], [])
    assert plan_reloads(mine, [Idle(3, None, frozenset({6}), 1e3, 0.0)]) == ([], [])
    assert plan_reloads(mine, [Idle(1, 6, frozenset({6}), 1e3, 0.0)]) == ([], [0, 1])
    assert plan_reloads(mine, [Idle(1, 6, frozenset({4, 5, 6}), 1e3, 0.0)]) == ([Reload(1, 5, [0])], []), (
        "the other waits for the next"
    )
