"""The controller's part in parking, message by message: which relay keeps a KV cache, who gets it, and when
it is let go."""

import pytest

from helpers.control.script import Script, samples_of, scripted
from laminar_hpc.line.messages.data import Partial, ReplicaLoad, VersionSpan
from laminar_hpc.line.messages.membership import Goodbye, Ping
from laminar_hpc.line.messages.moves import (
    Import,
    MoveAbort,
    MoveCommit,
    MoveFailed,
    MoveOrder,
    MoveReady,
    Reserve,
    Reserved,
)
from laminar_hpc.line.messages.parking import HandedOn, HandOn, Keep, Park, Parked, TakenUp, TakeUp, Unpark
from laminar_hpc.line.messages.rollouts import Grant, Leaving, Unfinished
from laminar_hpc.machine.files import jsonl
from laminar_hpc.rollout.partial_response import columns

KEPT, BYTES = 14, 4096


def told(script: Script, kind: type, place: str = "relay:0") -> list:
    """What a member was told of this kind and the test has not seen yet."""
    sent = script.hub.left.setdefault(f"{place}:", [])
    found = [message for message in sent if isinstance(message, kind)]
    sent[:] = [message for message in sent if not isinstance(message, kind)]
    return found


def response(count: int = 5) -> Partial:
    return Partial(*columns(list(range(count)), [-1.0] * count), [VersionSpan(0, 0, count)], 1.0)


def leaving(tmp_path, **pipeline: object) -> tuple[Script, Grant]:
    """One replica that generates and is told to end; nobody else is there."""
    script = scripted(tmp_path, repack="kv", **pipeline)
    (grant,) = script.working(1)
    script.works(0, grant, 3)
    script.hear("rollout", 0, Leaving())
    return script, grant


def park_all(script: Script, grant: Grant, relay: int = 0) -> dict[int, str]:
    """All that it generates parks at this relay; trajectory -> move."""
    where = f"relay:{relay}"
    moves = {int(park.move_id.split("-")[0]): park.move_id for park in told(script, Park, where)}
    assert moves.keys() == samples_of(grant).keys()
    for move_id in moves.values():
        script.hear("relay", relay, Reserved(move_id, "there"))
    orders = told(script, MoveOrder, "rollout:0")
    assert sorted((o.trajectory_id, o.address) for o in orders) == [(i, "there") for i in sorted(moves)]
    for move_id in moves.values():
        script.hear("rollout", 0, MoveReady(move_id, response()))
        (keep,) = told(script, Keep, where)
        assert keep.move_id == move_id
        script.hear("relay", relay, Parked(move_id, KEPT, BYTES))
    assert {m.move_id for m in told(script, MoveCommit, "rollout:0")} == set(moves.values())
    script.hear("rollout", 0, Goodbye())
    return moves


def test_what_is_parked_waits_for_a_replica_and_goes_there_once(tmp_path):
    """It is granted with the name of its KV cache; the relay is told where that goes, and the taker hears
    what came. A second question for it is answered with nothing."""
    script, grant = leaving(tmp_path)
    moves = park_all(script, grant)
    again = script.joins(1)
    assert again is not None and {i: part.parked for i, part in again.parts.items()} == {
        i: f"0:{move_id}" for i, move_id in moves.items()
    }
    assert {part.count for part in again.parts.values()} == {5} and script.state().discarded == 0
    for name in (part.parked for part in again.parts.values()):
        script.hear("rollout", 1, TakeUp(name, "here"))
        (hand_on,) = told(script, HandOn)
        assert (f"0:{hand_on.move_id}", hand_on.address) == (name, "here")
        script.hear("rollout", 1, TakeUp(name, "here"))
        assert told(script, HandOn) == [] and [t.tokens for t in told(script, TakenUp, "rollout:1")] == [0]
        script.hear("relay", 0, HandedOn(hand_on.move_id, KEPT, BYTES, ""))
        assert [(t.parked, t.tokens) for t in told(script, TakenUp, "rollout:1")] == [(name, KEPT)]
    script.closes()


def test_what_ends_without_its_cache_is_let_go(tmp_path):
    """The taker has had no room, or the trajectory's tokens go on from elsewhere: the relay forgets it."""
    script, grant = leaving(tmp_path)
    moves = park_all(script, grant)
    again = script.joins(1)
    assert again is not None
    first, *others = again.parts
    script.hear("rollout", 1, TakeUp(again.parts[first].parked, ""))
    assert [unpark.move_id for unpark in told(script, Unpark)] == [moves[first]]
    assert told(script, TakenUp, "rollout:1") == []
    script.ends(1, again, 2)
    script.controller.turn()
    assert {unpark.move_id for unpark in told(script, Unpark)} >= {moves[i] for i in others}
    script.closes()


def test_a_cache_that_never_came_has_no_name(tmp_path):
    """The source could not send it: nobody asks the relay."""
    script, _ = leaving(tmp_path)
    for park in told(script, Park):
        script.hear("relay", 0, Reserved(park.move_id, "there"))
        script.hear("rollout", 0, MoveReady(park.move_id, response()))
        script.hear("relay", 0, Parked(park.move_id, 0, 0))
    script.hear("rollout", 0, Goodbye())
    again = script.joins(1)
    assert again is not None and {part.parked for part in again.parts.values()} == {""}
    assert {part.count for part in again.parts.values()} == {5}
    script.closes()


@pytest.mark.parametrize("when", ["before", "asked"])
def test_a_relay_that_is_lost_holds_nobody_up(tmp_path, when):
    """Its caches are gone with it: who asks, or has asked, hears so at once, and prefills."""
    script, grant = leaving(tmp_path)
    park_all(script, grant)
    again = script.joins(1)
    assert again is not None
    name = next(iter(again.parts.values())).parked
    if when == "asked":
        script.hear("rollout", 1, TakeUp(name, "here"))
        assert told(script, TakenUp, "rollout:1") == []
    script.hear("relay", 0, Goodbye())
    if when == "before":
        script.hear("rollout", 1, TakeUp(name, "here"))
    assert [(t.parked, t.tokens) for t in told(script, TakenUp, "rollout:1")] == [(name, 0)]
    (noted,) = jsonl.read(script.run_dir / "metrics.jsonl", "taken_up")
    assert (noted["tokens"], noted["reason"]) == (0, "its relay is gone")
    script.closes()


def test_kv_caches_stay_inside_a_place(tmp_path):
    """A relay of another place is not asked to keep any; what one of the same place keeps goes to replicas of
    that place alone, and others prefill."""
    script = scripted(tmp_path, repack="kv")
    script.publish(0, 0)
    script.relay(1, "far", place="paris")
    script.relay_holds(1, 0)
    script.rollout(0, "far")  # which is where its machine's relay is
    script.asks(0, 0)
    grant = script.granted(0)
    assert grant is not None
    script.works(0, grant, 3)
    script.hear("rollout", 0, Leaving())
    assert told(script, Park) == []
    moves = park_all(script, grant, 1)
    again = script.joins(1)
    assert again is not None and {part.parked for part in again.parts.values()} == {
        f"1:{move_id}" for move_id in moves.values()
    }
    for name in (part.parked for part in again.parts.values()):
        script.hear("rollout", 1, TakeUp(name, "here"))
        assert [(t.parked, t.tokens) for t in told(script, TakenUp, "rollout:1")] == [(name, 0)]
    assert told(script, HandOn, "relay:1") == []
    assert {unpark.move_id for unpark in told(script, Unpark, "relay:1")} == set(moves.values())
    script.closes()


def test_the_source_goes_on_where_a_relay_is_full_or_lost(tmp_path):
    """A relay that refuses is not asked again; what was under way at one that is lost stays at its source,
    whose tokens so far count in the end."""
    script, grant = leaving(tmp_path)
    first, *others = told(script, Park)
    script.hear("relay", 0, MoveFailed(first.move_id, "it is full"))
    script.controller.turn()
    assert told(script, Park) == [] and [a.move_id for a in told(script, MoveAbort, "rollout:0")] == [
        first.move_id
    ]
    for park in others:
        script.hear("relay", 0, Reserved(park.move_id, "there"))
    told(script, MoveOrder, "rollout:0")
    script.hear("relay", 0, Goodbye())
    assert {a.move_id for a in told(script, MoveAbort, "rollout:0")} == {park.move_id for park in others}
    for i, attempt in samples_of(grant).items():
        script.hear("rollout", 0, Unfinished(i, attempt, response(4)))
    script.hear("rollout", 0, Goodbye())
    again = script.joins(1)
    assert again is not None and {(p.count, p.parked) for p in again.parts.values()} == {(4, "")}
    script.closes()


def test_relays_that_stay_are_asked_first(tmp_path):
    """Those on machines without replicas, then those on machines of which none leaves; one that refuses is
    followed by the next."""
    script = scripted(tmp_path, repack="kv")
    script.relay(1, "two")
    script.relay(2, "three")
    (grant,) = script.working(1)
    script.rollout(1, "two")
    script.works(0, grant, 3)
    script.hear("rollout", 0, Leaving())
    assert script.controller.parking.relays("") == [2, 1, 0]
    for relay in (2, 1, 0):
        asked = told(script, Park, f"relay:{relay}")
        assert len(asked) == len(samples_of(grant))
        for park in asked:
            script.hear("relay", relay, MoveFailed(park.move_id, "it is full"))
    script.controller.turn()
    assert not any(told(script, Park, f"relay:{relay}") for relay in range(3))
    script.closes()


@pytest.mark.parametrize("pipeline", [{"refresh": "interrupt"}, {"repack": "off"}, {"repack": "reprefill"}])
def test_where_nothing_would_take_it_up_nothing_parks(tmp_path, pipeline):
    """Responses that go on with newer weights, or without their KV cache, leave as before."""
    script = scripted(tmp_path, **{"repack": "auto", **pipeline})
    (grant,) = script.working(1)
    script.works(0, grant, 3)
    script.hear("rollout", 0, Leaving())
    assert told(script, Park) == []
    script.closes()


def test_a_move_to_a_replica_brings_the_name_along(tmp_path):
    """One generates on the same weights and has no room; when it reports some, it is told of the parked
    cache with the response so far."""
    script = scripted(tmp_path, repack="kv")
    grant, other = script.working(2)
    script.works(1, other, 3)
    script.works(0, grant, 3)
    script.hear("rollout", 0, Leaving())
    moves = park_all(script, grant)
    script.hear("rollout", 1, Ping(ReplicaLoad("draining", 0, 1, 0, kv_capacity=10_000, kv_tokens=10)))
    reserves = {reserve.trajectory_id: reserve for reserve in told(script, Reserve, "rollout:1")}
    assert reserves.keys() == moves.keys() and not any(reserve.kv for reserve in reserves.values())
    for i, reserve in reserves.items():
        script.hear("rollout", 1, Reserved(reserve.move_id, ""))
        (arrival,) = told(script, Import, "rollout:1")
        assert arrival.partial.parked == f"0:{moves[i]}" and arrival.partial.count == 5
    script.closes()
