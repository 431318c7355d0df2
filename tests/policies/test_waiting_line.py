"""The line of waiting replicas is served as a pass over all of them in the order of asking would serve it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.policies.waiting_line import WaitingLine

REPLICAS, WEIGHTS = st.integers(0, 7), st.integers(0, 2)
HISTORY = st.lists(
    st.tuples(st.just("ask"), REPLICAS, WEIGHTS)
    | st.tuples(st.just("scores"), REPLICAS, st.booleans())
    | st.tuples(st.just("leave"), REPLICAS, st.none()),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(history=HISTORY, shares=st.dictionaries(WEIGHTS, st.integers(0, 4)), least=st.integers(1, 3))
def test_a_pass_over_the_line_serves_whom_a_pass_over_all_would(history, shares, least):
    """docs/promises.md#turns: each weight id has so many shares to give, one to a replica; one whose
    responses are not scored yet takes none when fewer than `least` are left."""
    line = WaitingLine()
    asked: dict[int, list] = {}  # replica -> weight id, whether it scores; in the order of asking
    for what, replica, value in history:
        if what == "ask":
            line.ask(replica, value)
            asked[replica] = [value, asked[replica][1] if replica in asked else False]
        elif what == "scores":
            line.scores(replica, value)
            if replica in asked:
                asked[replica][1] = value
        else:
            line.leave(replica)
            asked.pop(replica, None)
    assert list(line) == list(asked) and len(line) == len(asked)
    assert all(line.weight_id(replica) == weight_id for replica, (weight_id, _) in asked.items())
    assert all(line.count(i) == sum(i == weight_id for weight_id, _ in asked.values()) for i in range(3))

    plain, left = [], dict(shares)
    for replica, (weight_id, scores) in asked.items():
        if left.get(weight_id, 0) >= (least if scores else 1):
            left[weight_id] -= 1
            plain.append(replica)
    served, left, looks = [], dict(shares), []

    def may_get(kind):
        looks.append(kind)
        return left.get(kind[0], 0) >= (least if kind[1] else 1)

    for replica in line.in_turn(may_get):
        left[line.weight_id(replica)] -= 1
        line.leave(replica)
        served.append(replica)
    assert served == plain
    assert len(looks) <= len(served) + 6, "each kind is asked once more than it is served"
    assert list(line) == [replica for replica in asked if replica not in served]
