"""When the controller's looks find something to move, report by report."""

import time

import pytest

from helpers.control.script import Script, samples_of, scripted
from laminar_hpc.controller.weights.weight_ids import HeldVersion
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.line.messages.membership import Ping
from laminar_hpc.line.messages.moves import Reserve
from laminar_hpc.line.messages.rollouts import RequestWork


@pytest.fixture
def script(tmp_path) -> Script:
    """Two replicas generate with the same weights; only the test looks."""
    script = scripted(tmp_path, prompts=16, samples=4, repack="kv", repack_seconds=1e6)
    script.publish(0, 0)
    for index in (0, 1):
        script.rollout(index)
        script.asks(index, 0)
    return script


def looks(script: Script, *kv: int, repeats: int = 0, queued: int = 0) -> list[Reserve]:
    """Each replica reports so much KV, as its pings then repeat; returns what a look reserves."""
    for index, tokens in enumerate(kv):
        in_flight = script.state().generating[index]
        load = ReplicaLoad(
            "draining", 0, in_flight, 0, in_flight, queued, tokens, kv_capacity=10_000, batch_max=1000
        )
        script.hear("rollout", index, *[Ping(load)] * (1 + repeats))
    for sent in script.hub.left.values():
        sent.clear()
    script.controller.repacker.consolidate(0.0)
    script.controller.turn()
    return [reserve for index in range(len(kv)) for reserve in script.sent(index, Reserve)]


@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_a_fall_between_two_looks_is_seen_however_often_a_report_is_repeated(script, repeats):
    """The emptier of two replicas whose KV falls goes to the other; while it grows, nothing does."""
    work = samples_of(script.granted(1))
    assert not looks(script, 4000, 3000, repeats=repeats)
    assert not looks(script, 4100, 3100, repeats=repeats)
    reserved = looks(script, 4000, 3000, repeats=repeats)
    assert {message.trajectory_id for message in reserved} == set(work)


def test_a_look_before_the_next_report_sees_the_same_fall(script):
    """The first look finds one replica that falls; when the other does, its report is still the one of
    before."""
    assert not looks(script, 4000, 3000)
    assert not looks(script, 4100, 2900)
    assert looks(script, 4000, 2900)


def test_what_waited_in_an_engine_was_no_ramp_down(script):
    """A fall from a time when requests were queued takes another look."""
    assert not looks(script, 9000, 8000, queued=1)
    assert not looks(script, 4000, 3000)
    assert looks(script, 3900, 2900)


def test_the_next_local_batch_is_no_ramp_down_of_the_one_before(script):
    """A replica that has drained and was granted more on the same weights holds less KV than before: that is
    no fall, and what it has just been granted stays where it is."""
    first = script.granted(1)
    assert not looks(script, 4000, 3000)
    script.ends(1, first, 4)
    script.hear("rollout", 1, RequestWork(0, first.batch_id))
    assert script.granted(1).batch_id != first.batch_id
    assert not looks(script, 3900, 200)
    assert not looks(script, 3950, 300)
    assert looks(script, 3900, 250)


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
