"""Replicas at another place ask for work before they have drained, and are given it on weights that they load
with it: no round trip stands between two local batches."""

import pytest

from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.line.messages.rollouts import RequestWork


@pytest.fixture
def script(tmp_path):
    """Replica 0 is near, replica 1 far away; all of a step's groups are granted on weights of that step."""
    made = Script(small_config(tmp_path, replicas=2, steps=50, refresh="drained", max_staleness=0))
    made.relay(1, "two", place="paris")
    made.rollout(0)
    made.rollout(1, "two", place="paris")
    yield made
    made.closes()


def both_work(script):
    """On the first weights; returns the grant of each."""
    first = script.publish(0, 0, 1)
    for replica in (0, 1):
        script.asks(replica, first)
    return [script.granted(replica) for replica in (0, 1)]


def test_a_request_ahead_is_for_weights_that_are_not_open_yet(script):
    """The replica serves its own until it says so, and what it asks again when it has drained is void."""
    _, before = both_work(script)
    newer = script.publish(1, 0, 1)
    script.hear("rollout", 1, RequestWork(newer, before.batch_id, ahead=True))
    ahead = script.granted(1)
    assert (before.weight_id, ahead.weight_id) == (0, newer)
    assert script.controller.replicas.at(1).weight_id == 0
    script.hear("rollout", 1, RequestWork(newer, before.batch_id))
    assert script.granted(1) is None
    script.asks(1, newer, ahead.batch_id)
    assert script.controller.replicas.at(1).weight_id == newer


def test_who_waits_far_away_is_granted_newer_weights_as_they_come(script):
    """One nearby pulls them first and asks again."""
    grants = both_work(script)
    for replica, grant in enumerate(grants):
        script.ends(replica, grant, 3)
        script.asks(replica, 0, grant.batch_id)
        assert script.granted(replica) is None
    script.trains(0)
    newer = script.publish(1, 0, 1)
    assert script.granted(0) is None
    assert script.granted(1).weight_id == newer
    script.asks(0, newer, grants[0].batch_id)
    assert script.granted(0).weight_id == newer
