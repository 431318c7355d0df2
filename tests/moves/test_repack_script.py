"""When the controller's looks find something to move, report by report."""

import time

import msgspec
import pytest

from helpers.control.script import Script, samples_of, scripted
from laminar_hpc.controller.trajectories.migration import PHASE_SECONDS
from laminar_hpc.controller.weights.weight_ids import HeldVersion
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.line.messages.membership import Ping
from laminar_hpc.line.messages.moves import MoveFailed, Reserve

CURVE = [(1, 0.010), (1000, 0.020)]  # half of a step of 1000 requests is spent on none of them


def two_replicas(tmp_path, place: str = "") -> Script:
    """They generate with the same weights, the second one at `place`; only the test looks."""
    script = scripted(tmp_path, prompts=16, samples=4, repack="auto", repack_seconds=1e6)
    script.controller.config.sampling.max_response_tokens = 1000
    script.relay(1, "two", place=place)
    script.publish(0, 0, 1)
    for index, machine in enumerate(("one", "two")):  # each is where its machine's relay is
        script.rollout(index, machine)
        script.asks(index, 0)
    return script


@pytest.fixture
def script(tmp_path) -> Script:
    return two_replicas(tmp_path)


def ended(script: Script, length: int) -> None:
    """A hundred responses of so many tokens have ended before."""
    for _ in range(100):
        script.controller.tracker.lengths.add(length)


def looks(script: Script, *kv: int, queued: int = 0, curve: list[tuple[int, float]] = CURVE) -> list[Reserve]:
    """Each replica reports so much KV, the first one so many that wait; returns what a look reserves."""
    for index, tokens in enumerate(kv):
        in_flight, waits = script.state().generating[index], 0 if index else queued
        engine = {"kv_tokens": tokens, "kv_capacity": 1_000_000, "decode_curve": curve}
        load = ReplicaLoad("draining", 0, in_flight, 0, in_flight - waits, waits, **engine)
        script.hear("rollout", index, Ping(load))
    for sent in script.hub.left.values():
        sent.clear()
    script.controller.repacker.consolidate(0.0)
    script.controller.turn()
    return [reserve for index in range(len(kv)) for reserve in script.sent(index, Reserve)]


def test_the_emptier_replica_is_emptied_where_that_pays(script):
    """A tail of some 900 steps frees 9 s, for twice the 2 s that a move is taken to cost at first."""
    ended(script, 1000)
    work = samples_of(script.granted(1))
    reserved = looks(script, 4000, 3000)
    assert {message.trajectory_id for message in reserved} == set(work)
    assert not looks(script, 4000, 3000), "while they move"


def test_nothing_moves_over_the_link_between_two_places(tmp_path):
    """The same replicas, of which one is at another place: KV caches stay inside a place."""
    script = two_replicas(tmp_path, "paris")
    ended(script, 1000)
    first, *_ = samples_of(script.granted(1)).items()
    assert not looks(script, 4000, 3000)
    script.controller.migration.begin(*first, 1, 0, 0, 50, time.monotonic())
    script.controller.turn()
    (reserve,) = script.sent(0, Reserve)
    assert not reserve.kv, "a move all the same would bring tokens alone"


@pytest.mark.parametrize("length", [100, 350])
def test_short_answers_stay(script, length):
    """What they would free, at most 3.5 s, is less than the moves may cost."""
    ended(script, length)
    assert not looks(script, 1000, 900)


def test_nothing_moves_where_a_step_takes_as_long_as_its_requests(script):
    """Where time is proportional to requests, no step is saved; and before a curve is known."""
    ended(script, 1000)
    assert not looks(script, 4000, 3000, curve=[(1, 0.01), (1000, 10.0)])
    assert not looks(script, 4000, 3000, curve=[])


def test_nothing_moves_that_no_work_would_follow(script):
    """An emptied replica would be idle."""
    ended(script, 1000)
    script.grants_nothing_new(True)
    assert not looks(script, 4000, 3000)
    script.grants_nothing_new(False)
    assert looks(script, 4000, 3000)


def test_a_destination_that_refuses_makes_moves_dear(script):
    """Each refusal counts as a move that took as long as a move may: what never works ends by itself."""
    ended(script, 1000)
    for reserve in looks(script, 4000, 3000):
        script.hear("rollout", 0, MoveFailed(reserve.move_id, "this cache does not move"))
    assert not looks(script, 4000, 3000)
    assert not script.controller.migration.moving and PHASE_SECONDS > 9


def test_what_waits_in_an_engine_goes_without_its_cache(script):
    """Requests of a queue that keeps its engine busy go to the replica with room, and nothing else does."""
    script.controller.config.sampling.max_response_tokens = 8000
    script.controller.config.pipeline.repack_requests = 16
    queued, grant = samples_of(script.granted(0)), script.granted(1)
    script.ends(1, msgspec.structs.replace(grant, groups=grant.groups[:6]), 10)
    ended(script, 8000)
    assert script.state().generating == {0: 32, 1: 8}
    reserved = looks(script, 4000, 3000, queued=28)
    assert len(reserved) == 8 and {(message.kv, message.tokens) for message in reserved} == {(False, 0)}
    assert {message.trajectory_id for message in reserved} < queued.keys()


def test_a_look_after_a_publication_delays_no_other(script, monkeypatch):
    """The planner looks every repack_seconds, and in between when there are newer weights."""
    repacker, seen = script.controller.repacker, list[float]()
    monkeypatch.setattr(repacker, "consolidate", seen.append)
    script.controller.config.pipeline.repack_seconds = 5.0
    begin = time.monotonic() + 1e7  # whatever has been looked at before
    for second in (0, 2, 4, 5, 7, 10):
        if second == 4:
            script.controller.weights.newest = HeldVersion(9, 9)
        repacker.tick(begin + second)
    assert [when - begin for when in seen] == pytest.approx([0, 4, 5, 10])
