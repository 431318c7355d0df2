"""What the controller does with trajectories of a dead replica whose weights nobody else generates with,
message by message."""

import os

import pytest

from helpers.control.script import Script, samples_of
from helpers.emulated.stand import small_config
from laminar_hpc.controller.trajectories import failover as failover
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.data import ReplicaLoad, Sample
from laminar_hpc.line.messages.membership import Hello, Ping
from laminar_hpc.line.messages.moves import Reserve
from laminar_hpc.line.messages.rollouts import Grant, Holds, NotLoaded, RequestWork, WeightsOpened
from laminar_hpc.rollout.partial_response import tokens_of

TOKENS = 100


def new(tmp_path, replicas: int = 2, slots: int = 3, increments: int = 50) -> Script:
    config = small_config(tmp_path, replicas, steps=8, prompts=2 * replicas, samples=2)
    config.rollout.increment_tokens = increments
    config.relay.slots = slots
    return Script(config)


def alone_on_older_weights(script: Script, tokens: int = TOKENS) -> Grant:
    """Replica 0 generates on id 0; id 1 has come, and replica 1 waits on it: admission has nothing for it."""
    script.publish(0, 0)
    for index in (0, 1):
        script.rollout(index)
    script.asks(0, 0)
    grant = script.granted(0)
    assert grant is not None and grant.parts == {}
    if tokens:
        script.works(0, grant, tokens)
    script.grants_nothing_new()
    script.publish(1, 0)
    script.asks(1, 1)
    assert script.granted(1) is None
    return grant


def test_a_waiting_replica_loads_the_older_weights_and_every_trajectory_ends_once(tmp_path):
    """docs/promises.md#nothing-lost: it gets the tokens so far under the next attempt; a report of the
    dead replica counts for nothing any more."""
    script = new(tmp_path)
    first = alone_on_older_weights(script)
    script.dies(0)
    rescue = script.granted(1)
    assert rescue is not None and (rescue.weight_id, rescue.weight_step) == (0, 0)
    assert samples_of(rescue) == {i: attempt + 1 for i, attempt in samples_of(first).items()}
    assert {i: tokens_of(part).tolist() for i, part in rescue.parts.items()} == {
        i: [(i + k) % 50 for k in range(TOKENS)] for i in samples_of(first)
    }
    assert {part.moves for part in rescue.parts.values()} == {1} and {
        g.group_id: g.prompt_tokens for g in rescue.groups
    } == {g.group_id: g.prompt_tokens for g in first.groups}
    script.hear("rollout", 1, WeightsOpened(0, 0, 0.1, {}, [], 0.0))
    script.works(1, rescue, 50)
    script.rollout(0, life="late")
    script.ends(0, first, 7, life="late")
    assert script.state().ready_groups == 0
    script.ends(1, rescue, 200)
    assert script.state().ready_groups == len(first.groups) and script.state().discarded == 0
    ended = [whole.record for whole in script.finished()]
    assert sorted(t.trajectory_id for t in ended) == sorted(samples_of(first))
    assert {(t.replica, t.weight_id, t.attempt, t.moves, t.length) for t in ended} == {
        (1, 0, 1, 1, TOKENS + 200)
    }


def test_a_request_that_crossed_the_grant_is_void(tmp_path):
    """The replica asked on its newer weights before it had the grant: nothing else is given to it until it
    asks again."""
    script = new(tmp_path)
    alone_on_older_weights(script)
    script.dies(0)
    rescue = script.granted(1)
    script.grants_nothing_new(False)
    script.asks(1, 1, newest_batch=None)
    assert script.granted(1) is None
    script.hear("rollout", 1, WeightsOpened(0, 0, 0.1, {}, [], 0.0))
    script.ends(1, rescue, 5)
    script.asks(1, 1, newest_batch=rescue.batch_id)
    more = script.granted(1)
    assert more is not None and more.weight_id == 1 and more.parts == {}


@pytest.mark.parametrize("how", ["two slots", "another machine", "relay anew", "nothing known"])
def test_what_cannot_be_loaded_starts_again_from_its_prompt(tmp_path, how):
    """With two slots the older one is being written; the other machine never had it; a relay that starts anew
    has empty slots. What was known is counted as discarded, once."""
    script = new(tmp_path, slots=2 if how == "two slots" else 3)
    if how == "another machine":
        script.relay(1, "two")
    first = alone_on_older_weights(script, tokens=0 if how == "nothing known" else TOKENS)
    if how == "another machine":
        script.hear("relay", 1, RelayHas(1, 1, 1, 0.1, 0.0))
        script.dies(1)
        script.rollout(1, machine="two", life="moved")
        script.asks(1, 1, life="moved")
    if how == "relay anew":
        script.relay(0, "one", life="anew")
        script.hear("relay", 0, RelayHas(1, 1, 1, 0.1, 0.0), life="anew")
    script.dies(0)
    again = script.granted(1, life="moved" if how == "another machine" else "")
    assert again is not None and again.weight_id == 1 and again.parts == {}
    assert samples_of(again) == {i: attempt + 1 for i, attempt in samples_of(first).items()}
    assert script.state().discarded == (0 if how == "nothing known" else TOKENS * len(samples_of(first)))
    assert script.state().known == 0


def test_a_slot_that_is_gone_meanwhile(tmp_path):
    """The replica finds it rewritten: the trajectories are with nobody again, and its next request settles
    them. No hang, no loss."""
    script = new(tmp_path)
    first = alone_on_older_weights(script)
    script.dies(0)
    rescue = script.granted(1)
    script.hear(
        "rollout",
        1,
        NotLoaded(rescue.batch_id, "weight id 0 is in no slot"),
        NotLoaded(rescue.batch_id, "said twice"),
    )
    assert script.granted(1) is None and script.state().discarded == 0
    script.hear("rollout", 1, RequestWork(1, rescue.batch_id))
    again = script.granted(1)
    assert (
        again is not None
        and again.weight_id == 1
        and again.parts == {}
        and script.state().discarded == TOKENS * len(samples_of(first))
    )
    script.ends(1, again, 5)
    assert script.state().ready_groups == len(first.groups)


@pytest.mark.parametrize("later", [False, True])
def test_a_slot_that_is_gone_of_weights_that_were_served(tmp_path, later):
    """Newer weights came to the replica before the grant, and the older ones were rewritten; or the grant was
    an earlier controller's. What nobody has begun is with nobody, new groups and rescued ones."""
    script = new(tmp_path, replicas=3)
    script.publish(0, 0)
    script.rollout(0)
    script.rollout(1, phase="draining")
    script.asks(0, 0)
    script.works(0, script.granted(0), TOKENS)
    script.dies(0)
    script.asks(1, 0)
    both = script.granted(1)
    assert both is not None and 0 < len(both.parts) < len(samples_of(both))
    if later:
        script = script.again(trainer=False)
        held = [Sample(i, attempt) for i, attempt in samples_of(both).items()]
        hello = Hello("rollout", 1, "", os.getpid(), "one", rejoins=True)
        script.hear("rollout", 1, hello, Holds(0, both.batch_id, held, [], []))
    assert script.state().generating[1] == len(samples_of(both))
    script.hear("rollout", 1, NotLoaded(both.batch_id - 1, "of an earlier one"))
    assert script.state().generating[1] == len(samples_of(both))
    script.hear("rollout", 1, NotLoaded(both.batch_id, "weight id 0 is in no slot"))
    assert 1 not in script.state().generating
    script.hear("rollout", 1, WeightsOpened(0, 0, 0.1, {}, [], 0.0), RequestWork(0, both.batch_id))
    again = script.granted(1)
    assert again is not None and samples_of(again).keys() >= samples_of(both).keys()
    script.closes()


def test_the_replica_dies_while_it_loads_and_one_that_is_starting_takes_over(tmp_path):
    """The one that has just been started again has to load something anyway; it is told before its engine is
    up. What the one before it had added counts."""
    script = new(tmp_path)
    first = alone_on_older_weights(script)
    script.dies(0)
    rescue = script.granted(1)
    script.works(1, rescue, 50)
    script.dies(1)
    script.rollout(0, life="again", phase="draining")
    assert script.granted(0, life="again") is None, "taken for dead and heard again, it is at work"
    script.dies(0, life="again")
    script.rollout(0, life="new")
    second = script.granted(0, life="new")
    assert (
        second is not None
        and second.weight_id == 0
        and {part.count for part in second.parts.values()} == {TOKENS + 50}
    )
    assert samples_of(second) == {i: attempt + 2 for i, attempt in samples_of(first).items()}
    script.rollout(1, life="new")
    assert script.granted(1, life="new") is None
    script.hear("rollout", 0, WeightsOpened(0, 0, 0.1, {}, [], 0.0), life="new")
    script.ends(0, second, 5, life="new")
    assert script.state().ready_groups == len(first.groups) and script.state().discarded == 0


def test_one_that_serves_the_weights_gets_its_batch_along_with_them(tmp_path):
    """No load: its local batch is what is left of the dead replica's and what admission gives."""
    script = new(tmp_path, replicas=3)
    script.publish(0, 0)
    for index in (0, 1):
        script.rollout(index)
    script.asks(0, 0)
    first = script.granted(0)
    script.works(0, first, TOKENS)
    script.grants_nothing_new()
    script.asks(1, 0)
    script.grants_nothing_new(False)
    script.dies(0)
    both = script.granted(1)
    fresh = {group.group_id for group in both.groups} - {group.group_id for group in first.groups}
    assert (
        both.weight_id == 0
        and both.parts.keys() == samples_of(first).keys()
        and len(fresh) == len(first.groups) == 2
    )
    script.ends(1, both, 5)
    assert script.state().ready_groups == 4


def test_what_waits_goes_on_where_a_report_tells_of_room(tmp_path):
    """A report that comes after the death counts like one from before it, once: as many move there as it has
    room for, and the others wait on."""
    script = new(tmp_path)
    grants = script.working(2)
    script.works(0, grants[0], TOKENS)
    waiting = set(samples_of(grants[0]))

    def asked() -> list[int]:
        sent, script.hub.left["rollout:1:"] = script.hub.left["rollout:1:"], []
        return [message.trajectory_id for message in sent if isinstance(message, Reserve)]

    script.dies(0)
    assert len(waiting) == 4 and asked() == []
    prompt = len(grants[0].groups[0].prompt_tokens)
    for _ in range(2):
        room = 2 * (prompt + TOKENS) + 1
        load = ReplicaLoad("draining", 0, 4, 0, kv_capacity=10_000, kv_tokens=10_000 - room)
        script.hear("rollout", 1, Ping(load))
        moved = asked()
        assert len(moved) == 2 and waiting.issuperset(moved)
        waiting.difference_update(moved)
        script.hear("relay", 0, Ping())
        assert asked() == []
    assert not waiting and script.state().discarded == 0


def test_after_some_tries_it_starts_again(tmp_path):
    """A trajectory is rescued TRIES times; then its tokens count as discarded."""
    script = new(tmp_path)
    first = alone_on_older_weights(script)
    script.dies(0)
    for life in range(failover.TRIES - 1):
        assert script.granted(1, life=str(life) if life else "") is not None
        script.dies(1, life=str(life) if life else "")
        script.rollout(1, life=str(life + 1))
    life = str(failover.TRIES - 1)
    assert script.granted(1, life=life).parts
    script.dies(1, life=life)
    assert script.state().discarded == TOKENS * len(samples_of(first))
    script.rollout(1, life="last")
    assert script.granted(1, life="last") is None
    script.asks(1, 1, life="last")
    again = script.granted(1, life="last")
    assert again.parts == {} and samples_of(again).keys() == samples_of(first).keys()


def test_only_one_older_id_at_a_time_is_loaded_from_three_slots(tmp_path):
    """Or the relay would have none to write to."""
    script = new(tmp_path)
    weights = script.controller.weights
    for step in range(5):
        script.publish(step, 0)
    assert weights.loadable("one", set()) == {2, 3, 4} and weights.loadable("one", {4}) == {2, 3, 4}
    assert weights.loadable("one", {3}) == {3, 4} and weights.loadable("two", set()) == frozenset()
