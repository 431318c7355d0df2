"""When an engine verifies drafts: never for long where that is slower, and not at all above where nothing
says that it pays."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.policies.speculation import FIRST, LOST, PAUSE_MAX, SpeculationGate


def steps(gate: SpeculationGate, requests: int, count: int, seconds: dict[bool, float], tokens: float) -> int:
    """How many of `count` steps verified; a step takes `seconds` of its kind, and one that verifies brings
    `tokens` a request."""
    verified = 0
    for _ in range(count):
        kind = gate.verifies(requests)
        verified += kind
        gate.record(requests, kind, seconds[kind], tokens if kind else 1.0)
    return verified


def test_the_faster_kind_is_taken_and_the_slower_one_looked_at_ever_more_rarely() -> None:
    """Twice the tokens in 1.5 times the time pays, in 2.5 times it does not."""
    assert steps(SpeculationGate(), 4, 2000, {False: 1.0, True: 1.5}, 2.0) > 1970
    gate = SpeculationGate()
    steps(gate, 4, 2000, {False: 1.0, True: 2.5}, 2.0)
    assert steps(gate, 4, 2000, {False: 1.0, True: 2.5}, 2.0) <= 2000 // PAUSE_MAX + 1


def test_it_turns_when_drafts_become_good() -> None:
    """A gate that has given up finds out by its looks."""
    gate = SpeculationGate()
    steps(gate, 4, 500, {False: 1.0, True: 1.5}, 1.0)
    steps(gate, 4, 2500, {False: 1.0, True: 1.5}, 4.0)
    assert steps(gate, 4, 100, {False: 1.0, True: 1.5}, 4.0) > 90


def test_a_full_engine_tries_nothing_without_evidence() -> None:
    """Promise: more than FIRST requests verify only where half as many do so with profit."""
    gate = SpeculationGate()
    assert not steps(gate, 64, 1000, {False: 1.0, True: 9.0}, 1.0)
    steps(gate, FIRST, 100, {False: 1.0, True: 1.0}, 3.0)
    assert not steps(gate, 64, 100, {False: 1.0, True: 9.0}, 1.0), "32 and 16 have not been tried"
    for requests in (16, 32):
        assert steps(gate, requests, 100, {False: 1.0, True: 1.0}, 3.0) > 80
    assert steps(gate, 64, 500, {False: 1.0, True: 9.0}, 1.0) == 1, "which says enough"
    assert steps(gate, 64, 8000, {False: 1.0, True: 9.0}, 1.0) <= 8000 * LOST / 8 + 1, "1% of the time"


@given(
    costs=st.lists(st.floats(0.2, 8.0), min_size=8, max_size=8),
    tokens=st.lists(st.floats(1.0, 8.0), min_size=8, max_size=8),
    sizes=st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]), min_size=1, max_size=40),
)
def test_time_lost_to_looks_is_bounded(costs: list[float], tokens: list[float], sizes: list[int]) -> None:
    """Promise: at any number of requests where verifying is slower, all but a few steps are plain, in
    whatever order batches of all sizes come."""
    gate, counted, verified = SpeculationGate(), Counter[int](), Counter[int]()
    for requests in sizes:
        index = requests.bit_length() - 1
        verified[index] += steps(gate, requests, 50, {False: 1.0, True: costs[index]}, tokens[index])
        counted[index] += 50
    for index, count in counted.items():
        if tokens[index] < costs[index]:
            assert verified[index] <= 4 + count / 16 + 1
