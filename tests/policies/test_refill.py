"""What a replica asks for while it generates: no more than it can begin at once, and something whenever it
can."""

from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.config.adapter_places import adapters_at_once
from laminar_hpc.config.system_schema import PipelineConfig
from laminar_hpc.policies.refill import KV_SHARE, held, room


@given(
    in_flight=st.integers(0, 300),
    queued=st.integers(0, 3),
    kv_tokens=st.integers(0, 10_000),
    kv_capacity=st.integers(0, 10_000),
    requests_max=st.integers(1, 256),
)
def test_no_more_than_can_begin_at_once(in_flight, queued, kv_tokens, kv_capacity, requests_max):
    """Nothing while a request waits; never beyond the places, nor beyond the share of the KV cache when each
    new trajectory takes the mean of the others."""
    found = room(in_flight, queued, kv_tokens, kv_capacity, requests_max)
    assert 0 <= found <= max(0, requests_max - in_flight)
    if queued:
        assert found == 0
    if found and in_flight and kv_tokens and kv_capacity:
        assert kv_tokens * (1 + found / in_flight) <= KV_SHARE * kv_capacity * (1 + 1e-9)
    if not in_flight and not queued:
        assert found == requests_max


def test_an_engine_holds_what_can_be_untrained_and_what_is_published():
    """max_staleness + 2: steps s - b to s, and s + 1."""
    assert [held(bound) for bound in (0, 2, 4)] == [2, 4, 6]


def test_an_engine_has_a_place_for_each_that_is_held_and_one_that_arrives():
    """The configuration counts places and slots before anything starts, the policy what stays in them."""
    for bound in range(20):
        assert adapters_at_once(PipelineConfig(max_staleness=bound)) == held(bound) + 1
