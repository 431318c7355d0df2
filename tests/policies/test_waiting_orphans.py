"""Who goes on by a report, against a pass over all that wait."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.policies import waiting_orphans
from laminar_hpc.policies.failover import Orphan, Room, redirect
from laminar_hpc.policies.waiting_orphans import WaitingOrphans

WEIGHTS, TOKENS = st.integers(0, 2), st.integers(0, 12)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("comes"), st.integers(0, 30), WEIGHTS, TOKENS),
        st.tuples(st.just("goes"), st.integers(0, 30), WEIGHTS, TOKENS),
        st.tuples(st.just("reports"), st.integers(0, 30), WEIGHTS, st.integers(0, 40)),
    ),
    max_size=80,
)


@given(EVENTS)
def test_a_report_places_whom_a_pass_over_all_would(events):
    """docs/promises.md#turns: the same ones, each of which fits; what has gone on waits no more."""
    waiting, plain = WaitingOrphans(), dict[int, tuple[Orphan, int]]()
    for number, (event, trajectory_id, weight_id, tokens) in enumerate(events):
        if event == "comes" and trajectory_id not in plain:
            orphan = Orphan(trajectory_id, weight_id, tokens, tokens)
            plain[trajectory_id] = orphan, number
            waiting.put(orphan, number, float(number))
        elif event == "goes":
            waiting.discard(trajectory_id)
            plain.pop(trajectory_id, None)
        elif event == "reports":
            room = Room(0, weight_id, float(tokens))
            wanted = redirect([orphan for orphan, _ in plain.values()], [room])
            assert waiting.fitting(room) == list(wanted)
            for each in wanted:
                _, attempt = plain.pop(each)
                assert waiting.pop(each) == (attempt, float(attempt))
        assert list(waiting) == [(i, attempt) for i, (_, attempt) in plain.items()]
        assert waiting.weight_ids == {orphan.weight_id for orphan, _ in plain.values()}
        assert len(waiting) == len(plain)


def test_the_example():
    assert doctest.testmod(waiting_orphans).failed == 0
