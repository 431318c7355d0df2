"""Repack: consolidates the tail inside one weight id, never beyond the limits."""

from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.policies.repack import Merge, ReplicaView, plan, saturation_batch


def view(replica: int, kv: float, requests: int, weight_id: int = 0, before: float = 1e9) -> ReplicaView:
    return ReplicaView(replica, weight_id, kv, before, requests)


VIEWS = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0, 120), st.floats(0, 120), st.integers(0, 40)),
    min_size=0,
    max_size=40,
).map(lambda rows: [ReplicaView(i, *row) for i, row in enumerate(rows)])


@given(views=VIEWS, kv_max=st.floats(1, 100), requests_max=st.integers(1, 32))
def test_moves_keep_to_the_limits_and_to_one_weight_id(views, kv_max, requests_max):
    """Section 4: same weights, sums within C_max and B, an emptied replica receives nothing, a filled one is
    not emptied."""
    known = {view.replica: view for view in views}
    kv = {r: x.kv_tokens for r, x in known.items()}
    requests = {r: x.requests for r, x in known.items()}
    moves = plan(views, kv_max, requests_max)
    sources, destinations = [m.source for m in moves], {m.destination for m in moves}
    assert len(set(sources)) == len(sources) and not set(sources) & destinations
    for move in moves:
        a, b = known[move.source], known[move.destination]
        assert (
            a.weight_id == b.weight_id
            and a.kv_tokens < a.kv_tokens_before
            and b.kv_tokens < b.kv_tokens_before
        )
        assert a.requests > 0 and b.requests > 0
        kv[move.destination] += kv[move.source]
        requests[move.destination] += requests[move.source]
        assert kv[move.destination] <= kv_max and requests[move.destination] <= requests_max
    assert plan(list(reversed(views)), kv_max, requests_max) == moves


def test_the_emptiest_goes_to_the_fullest_that_fits():
    """Best fit: sources from the emptiest up, each to the fullest destination."""
    assert plan([view(0, 10, 1), view(1, 85, 9), view(2, 95, 9), view(3, 60, 5)], 100, 20) == [Merge(0, 1)]
    assert plan([view(0, 10, 1), view(1, 20, 2), view(2, 30, 3)], 100, 20) == [Merge(0, 2), Merge(1, 2)]


def test_who_is_left_alone():
    """Rising KV use, other weights, too many requests, nothing in progress."""
    assert plan([view(0, 10, 1, before=9), view(1, 20, 2)], 100, 20) == []
    assert plan([view(0, 10, 1), view(1, 20, 2, weight_id=1)], 100, 20) == []
    assert plan([view(0, 10, 12), view(1, 20, 12)], 100, 20) == []
    assert plan([view(0, 0, 0), view(1, 20, 2)], 100, 20) == []


def test_one_that_only_waits_for_tools_is_emptied():
    """Its KV use does not fall, as nothing ends, and its engine has nothing to do. The limits hold."""
    stands, rises = ReplicaView(0, 0, 10, 10, 1, waiting=1), view(1, 20, 2, before=19)
    assert plan([stands, view(2, 30, 3)], 100, 20) == [Merge(0, 2)]
    assert plan([stands, ReplicaView(2, 0, 30, 30, 3, waiting=3)], 100, 20) == [Merge(0, 2)]
    assert plan([stands, rises], 100, 20) == []
    assert plan([ReplicaView(0, 0, 10, 10, 20, waiting=20), view(2, 30, 3)], 100, 20) == []


def test_request_limit_passes_over_the_fullest():
    """A destination with too many requests is left out, whatever its KV."""
    assert plan([view(0, 10, 5), view(1, 40, 5), view(2, 50, 18)], 100, 20) == [Merge(0, 1)]


def test_saturation_batch_of_an_h800():
    """About 295 tokens per step."""
    assert saturation_batch(989e12, 3.35e12) == 295


def test_a_filled_replica_still_serves_later_sources():
    """The filled replica is passed over as a source but stays a destination."""
    moves = plan([view(0, 10, 1), view(1, 45, 1), view(2, 46, 1), view(3, 80, 19)], 100, 20)
    assert moves == [Merge(0, 3), Merge(1, 2)]
    assert plan([view(0, 10, 1), view(1, 20, 1), view(2, 30, 1), view(3, 35, 1)], 100, 20) == [
        Merge(0, 3),
        Merge(1, 3),
        Merge(2, 3),
    ]
