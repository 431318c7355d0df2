"""The life of a move over all short histories, rounds of a barrier, and the batch that saturates an
engine."""

import doctest
import itertools

from laminar_hpc.policies import moves, rounds
from laminar_hpc.policies.moves import Action, Move, MovePhase
from laminar_hpc.policies.sizing import saturation_requests

EVENTS = {
    "reserved": lambda move: move.reserved("address"),
    "ready": Move.ready,
    "imported": Move.imported,
    "failed": lambda move: move.call_off("it failed"),
    "source gone": lambda move: move.replica_lost(1),
    "destination gone": lambda move: move.replica_lost(2),
}


def happened_in_order(wanted: list[str], seen: list[str]) -> bool:
    """Whether `wanted` is a subsequence of `seen`."""
    events = iter(seen)
    return all(any(event == each for event in events) for each in wanted)


def test_invariants_over_all_short_histories():
    """docs/promises.md#ownership. The owner changes at most once, never after the move is off, and only
    at an "imported" that follows what the destination needs to have; a move that is off says so once; a
    trajectory becomes an orphan at most once and only where its source is dead."""
    committed = 0
    for source in (1, None):
        for history in itertools.product(EVENTS, repeat=5):
            move, done, seen = Move("m", 7, 0, source, 2, 3, deadline=0.0), [], []
            for event in history:
                actions = EVENTS[event](move)
                done += actions
                seen.append(event)
                if Action.CHANGE_OWNER in actions:
                    order = ["reserved", "imported"] if source is None else ["reserved", "ready", "imported"]
                    assert event == "imported" and happened_in_order(order, seen)
            ends = [action for action in done if action in (Action.CHANGE_OWNER, Action.CALL_OFF)]
            assert len(ends) <= 1 and move.over == bool(ends)
            assert done.count(Action.ORPHAN) <= (1 if Action.CALL_OFF in done else 0)
            assert Action.ORPHAN not in done or source is None or "source gone" in history
            assert move.phase is not MovePhase.COMMITTED or Action.CHANGE_OWNER in done
            committed += move.phase is MovePhase.COMMITTED
    assert committed > 100


def test_what_parks_has_no_owner_afterwards_or_the_one_before():
    """Over all short histories: it parks at most once, only when its source has said what there is, and then
    neither changes its owner nor is called off; else it is called off at most once."""
    parked = 0
    for history in itertools.product(EVENTS, repeat=5):
        move, done, seen = Move("m", 7, 0, 1, None, 3, 0.0, relay=4), [], []
        for event in history:
            if event == "destination gone":
                continue  # it has none
            actions = EVENTS[event](move)
            done += actions
            seen.append(event)
            if Action.PARK in actions:
                assert event == "ready" and happened_in_order(["reserved", "ready"], seen)
                assert "source gone" not in seen
        ends = [action for action in done if action in (Action.PARK, Action.CALL_OFF)]
        assert len(ends) <= 1 and move.over == bool(ends)
        assert not {Action.CHANGE_OWNER, Action.IMPORT, Action.ORPHAN} & set(done)
        parked += Action.PARK in done
    assert parked > 100


def test_a_move_outlives_its_source_once_the_response_is_known():
    """In phase IMPORT the destination needs nothing more of the source."""
    move = Move("m", 7, 0, 1, 2, 3, deadline=0.0)
    assert move.reserved("") == [Action.ORDER] and move.ready() == [Action.IMPORT]
    assert move.replica_lost(1) == [] and move.imported() == [Action.CHANGE_OWNER]
    assert move.imported() == move.ready() == [Action.ANSWER], "who says it again is answered again"


def test_examples():
    """The examples in the docstrings hold."""
    assert doctest.testmod(moves).failed == doctest.testmod(rounds).failed == 0


def test_saturation_is_read_off_the_decode_curve():
    """Half as long again as one request is the limit, between measured points by interpolation."""
    assert saturation_requests([(1, 0.010), (2, 0.010), (4, 0.011), (8, 0.019)]) == 6
    assert saturation_requests([(1, 0.010), (2, 0.030)]) == 1
    assert saturation_requests([(1, 0.010), (256, 0.012)]) == 256
