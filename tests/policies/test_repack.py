"""Repack: consolidates inside one weight id where it frees more seconds than it costs, never beyond the
limits."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.policies.remaining import RemainingLengths
from laminar_hpc.policies.repack import (
    SOURCES_MAX,
    EngineLimits,
    Load,
    MoveCosts,
    ReplicaView,
    RequestView,
    Transfer,
    plan,
    saturation_batch,
)

FREE = MoveCosts(forced=True)
# a step takes 10 ms and 0.1 ms for each request
LINEAR = [(n, 0.010 + 0.0001 * n) for n in (1, 2, 4, 8, 16, 32, 64, 128)]


def view(replica: int, *requests: RequestView, weight_id: int = 0) -> ReplicaView:
    held = sum(request.kv_tokens for request in requests if not request.queued)
    queued = sum(request.queued for request in requests)
    return ReplicaView(replica, weight_id, held, len(requests), lambda: requests, queued)


def several(replica: int, count: int, kv: float, remaining: float = 10.0, **more: int) -> ReplicaView:
    """`count` requests of prompts of their own, `kv` tokens together."""
    return view(replica, *(_request(replica, i, kv / count, remaining) for i in range(count)), **more)


def _request(replica: int, number: int, kv: float, remaining: float, queued: bool = False) -> RequestView:
    return RequestView(1000 * replica + number, 1000 * replica + number, kv, remaining, queued)


def limits(kv: float = 100, requests: int = 20, curve: list[tuple[int, float]] = LINEAR) -> EngineLimits:
    return EngineLimits(kv, requests, curve)


REQUESTS = st.tuples(st.integers(0, 3), st.floats(0.5, 30), st.floats(0, 200), st.integers(0, 7))
FLEETS = st.lists(st.tuples(st.integers(0, 1), st.lists(REQUESTS, max_size=8)), max_size=12).map(
    lambda fleet: [
        view(
            r,
            *(
                RequestView(100 * r + i, 10 * r + g, kv, left, q == 0)
                for i, (g, kv, left, q) in enumerate(rows)
            ),
            weight_id=weight_id,
        )
        for r, (weight_id, rows) in enumerate(fleet)
    ]
)


def carried_out(fleet: list[ReplicaView], transfers: list[Transfer]) -> list[ReplicaView]:
    """The fleet after the transfers, before another token."""
    held = {each.replica: list(each.details()) for each in fleet}
    for each in transfers:
        gone = [r for r in held[each.source] if r.trajectory_id in each.trajectories]
        assert len(gone) == len(each.trajectories)
        held[each.source] = [r for r in held[each.source] if r not in gone]
        held[each.destination] += [r._replace(queued=False) for r in gone]
    return [view(each.replica, *held[each.replica], weight_id=each.weight_id) for each in fleet]


def drains(fleet: list[ReplicaView], engine: EngineLimits) -> float:
    return sum(engine.drain(Load.of(each.details())) for each in fleet)


@given(FLEETS, st.floats(10, 200), st.integers(1, 16), st.integers(0, 5), st.floats(0, 0.1))
def test_a_plan_keeps_to_its_invariants(fleet, kv, requests, emptied_max, seconds):
    """Same weights; each trajectory at most once; nobody emptied and filled; no more emptied than find work;
    destinations within KV cache and requests, as expected to grow; and what is emptied is empty. The order of
    replicas changes nothing, nor do sums in place of their details."""
    engine, costs = limits(kv, requests), MoveCosts()
    costs.add(seconds)
    transfers = plan(fleet, engine, costs, emptied_max)
    known = {each.replica: each for each in fleet}
    moved = [i for each in transfers for i in each.trajectories]
    sources = {each.source for each in transfers}
    emptied = {each.source for each in transfers if each.empties}
    assert len(moved) == len(set(moved)) and all(each.trajectories for each in transfers)
    assert not sources & {each.destination for each in transfers} and len(emptied) <= emptied_max
    assert all(known[t.source].weight_id == known[t.destination].weight_id for t in transfers)
    after = {each.replica: each for each in carried_out(fleet, transfers)}
    assert not any(after[replica].requests for replica in emptied)
    queued = {r.trajectory_id for each in fleet for r in each.details() if r.queued}
    assert all(i in queued for t in transfers if not t.empties for i in t.trajectories)
    for each in transfers:
        assert engine.fits(Load.of(after[each.destination].details()))
    assert plan(list(reversed(fleet)), engine, costs, emptied_max) == transfers
    summed = [each._replace(load=lambda each=each: Load.of(each.details())) for each in fleet]
    assert plan(summed, engine, costs, emptied_max) == transfers


@given(FLEETS, st.floats(0.001, 0.1))
def test_plan_after_plan_ends(fleet, seconds):
    """Each one lowers the seconds until all replicas have drained by more than its moves cost: nothing moves
    back and forth."""
    engine, costs = limits(150, 16), MoveCosts()
    costs.add(seconds)
    left = drains(fleet, engine)
    for _ in range(len(fleet) * 8 + 1):
        transfers = plan(fleet, engine, costs, len(fleet))
        if not transfers:
            return
        fleet = carried_out(fleet, transfers)
        assert drains(fleet, engine) < left - seconds
        left = drains(fleet, engine)
    raise AssertionError("it never ends")


def test_the_emptiest_goes_to_the_fullest_that_fits():
    """Best fit: sources from the emptiest up, each to the fullest destination."""
    fleet = [several(0, 1, 10, 1), several(1, 9, 85, 1), several(2, 9, 95, 1), several(3, 5, 60, 1)]
    assert plan(fleet, limits(), FREE, 1) == [Transfer(0, 1, (0,))]


def test_a_source_is_spread_where_no_destination_takes_it_whole():
    """Its prompts go to the fullest that take them, the samples of each together; all of them or none."""
    samples = [RequestView(i, i // 2, 10, 5.0) for i in range(6)]  # three prompts of two samples
    others = [several(1, 4, 80, 5), several(2, 3, 61, 5), several(3, 3, 62, 5)]
    assert plan([view(0, *samples), *others], limits(), FREE, 1) == [
        Transfer(0, 1, (0, 1)),
        Transfer(0, 3, (2, 3)),
        Transfer(0, 2, (4, 5)),
    ]
    assert plan([view(0, *samples), *others[:2]], limits(), FREE, 1) == []


def test_full_replicas_hide_nobody_with_room():
    """Promise: however many replicas are too full to take anything, a tail finds one that has room; and where
    all that could take it whole are full, what several have left is found."""
    full = [several(10 + i, 10, kv=96 + 0.3 * i) for i in range(12)]
    tails = [several(0, 2, kv=10), several(1, 3, kv=12)]
    (transfer,) = plan([*tails, *full], limits(), FREE, 20)
    assert (transfer.source, transfer.destination) == (0, 1)
    nearly = [several(30 + i, 10, kv=90, remaining=1.0) for i in range(12)]
    spread = plan([several(0, 4, kv=24, remaining=1.0), *nearly], limits(), FREE, 20)
    assert {t.source for t in spread} == {0} and len(spread) > 1


def test_a_plan_of_a_large_fleet_is_bounded():
    """Promise: at most SOURCES_MAX replicas are emptied in one plan, and the next one goes on."""
    fleet = [several(i, 2, kv=10) for i in range(300)]
    first = plan(fleet, limits(), FREE, 1000)
    assert len({t.source for t in first}) == SOURCES_MAX
    assert len({t.source for t in plan(carried_out(fleet, first), limits(), FREE, 1000)}) == SOURCES_MAX


def test_it_is_done_where_it_frees_more_than_it_costs():
    """Steps that nobody has to take any more are worth 10 ms each; a move costs twice its seconds."""
    fleet = [several(0, 1, 1, remaining=100), several(1, 2, 2, remaining=200)]
    for seconds, moves in ((0.4, True), (0.6, False)):  # 100 steps of 10 ms
        costs = MoveCosts()
        costs.add(seconds)
        assert bool(plan(fleet, limits(1000), costs, 4)) is moves
    assert not plan(fleet, limits(1000), MoveCosts(), 4)  # nothing is measured: two seconds
    assert plan(fleet, limits(1000), MoveCosts(time_scale=5.0), 4)  # which emulated engines pass in 0.4
    proportional = [(1, 0.010), (64, 0.640)]
    costs = MoveCosts()
    costs.add(0.001)
    assert not plan(fleet, limits(1000, curve=proportional), costs, 4)


def test_what_is_prefilled_again_costs_its_tokens():
    """A token at most its share of a full step: 12 ms for 20."""
    costs, load = MoveCosts(), Load(1, 1000.0, 1.0, 1.0)
    costs.add(0.0)
    assert costs.seconds(load, EngineLimits(1e6, 20, LINEAR, prefills=True)) == pytest.approx(
        1000 * 0.012 / 20
    )
    assert costs.seconds(load, limits(1e6)) == 0.0


def test_requests_that_wait_go_to_where_there_is_room():
    """Those of a full engine's queue, and only those, where the queue is what keeps it busy."""
    running = [_request(0, i, 20, 100) for i in range(4)]
    waiting = [_request(0, 10 + i, 1, 50, queued=True) for i in range(60)]
    fleet = [view(0, *running, *waiting), several(1, 2, 20, 100)]
    (transfer,) = plan(fleet, limits(500, 8), FREE, 4)
    assert (transfer.source, transfer.destination, transfer.empties) == (0, 1, False)
    assert set(transfer.trajectories) <= {request.trajectory_id for request in waiting}
    assert len(transfer.trajectories) == 6
    assert not plan([view(0, *running, *waiting[:4]), several(1, 2, 20, 100)], limits(500, 8), FREE, 4)


def test_the_kv_of_a_load_grows_to_its_expected_maximum():
    """Of exponential remaining lengths: as the sum over steps says."""
    n, c, m = 40, 100.0, 900.0
    highest = max(n * math.exp(-s / m) * (c + s) for s in range(5000))
    assert Load(n, n * c, n * m, 3000.0).kv_peak == pytest.approx(highest, rel=1e-4)
    assert Load(n, n * c, n * 50.0, 100.0).kv_peak == n * c


def test_a_drain_is_as_long_as_its_steps():
    """Linear steps: a S + b W, and with more requests than run at a time W / n steps."""
    engine = limits(1e9, 100)
    assert engine.drain(Load(10, 10, 500.0, 100.0)) == pytest.approx(0.010 * 100 + 0.0001 * 500)
    assert engine.drain(Load(1000, 10, 50_000.0, 100.0)) == pytest.approx(500 * engine.step(100))
    assert engine.drain(Load()) == 0.0


@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_remaining_lengths_are_the_mean_residual_life(sigma):
    """As a pass over all lengths says; of a longer one half of what is left."""
    draw, lengths = random.Random(0), RemainingLengths(5000)
    drawn = [min(5000, int(draw.lognormvariate(6, sigma))) for _ in range(1000)]
    assert lengths.expected(100) == 2450
    for length in drawn:
        lengths.add(length)
    for generated in (0, 100, 1000):
        longer = [length - generated for length in drawn if length > generated]
        assert lengths.expected(generated) == pytest.approx(sum(longer) / len(longer), rel=0.2)
    assert lengths.expected(5000) == 0.0


def test_saturation_batch_of_an_h800():
    """About 295 tokens per step."""
    assert saturation_batch(989e12, 3.35e12) == 295
