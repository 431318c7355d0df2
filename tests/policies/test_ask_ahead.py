"""How many trajectories are left when a replica far away asks for its next local batch."""

import doctest
import math

from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.policies import ask_ahead
from laminar_hpc.policies.ask_ahead import EARLY, left_when_due, wanted


@given(
    ends=st.lists(st.floats(0, 1000), min_size=1, max_size=50).map(sorted),
    answer=st.floats(0, 10) | st.just(math.inf),
)
def test_what_is_left_when_it_is_due_is_known_of_the_batch_before(ends, answer):
    """Some are left, and not all; no more than as many times as early as is needed."""
    left = left_when_due(ends, answer)
    assert 0 <= left < len(ends)
    assert left == 0 or ends[-1] - ends[-1 - left] <= EARLY * wanted(ends, answer)
    assert doctest.testmod(ask_ahead).failed == 0
