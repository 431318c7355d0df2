"""A publication's states by themselves: no threads, no weights, all histories."""

from collections import deque

import pytest

from laminar_hpc.trainer.publishing.publication import (
    Claim,
    Publication,
    PublicationEvent,
    PublicationProgress,
)

State = tuple[PublicationProgress, Claim]


def at(state: State) -> Publication:
    publication = Publication(0, [], 0.0)
    publication.progress, publication.claim = state
    return publication


def after(state: State, event: PublicationEvent) -> State | None:
    """None where the event is not allowed."""
    publication = at(state)
    if not publication.allows(event):
        return None
    publication.advance(event)
    return publication.progress, publication.claim


def reachable(start: State) -> set[State]:
    seen, left = {start}, deque([start])
    while left:
        state = left.popleft()
        for event in PublicationEvent:
            following = after(state, event)
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return seen


ALL = reachable((PublicationProgress.IDLE, Claim.WORKING))


def test_released_weights_are_never_read():
    """In no reachable state are weights both released and read, and every other state is reachable."""
    every = {(progress, claim) for progress in PublicationProgress for claim in Claim}
    assert every - ALL == {(PublicationProgress.READING, Claim.RELEASED)}


def test_a_release_is_final():
    """Released weights are neither read, sent again nor fenced again; what was on its way arrives or
    breaks."""
    for state in ALL:
        if state[1] is Claim.RELEASED:
            assert {event for event in PublicationEvent if after(state, event)} <= {
                PublicationEvent.ARRIVED,
                PublicationEvent.BROKE,
            }
            assert all(claim is Claim.RELEASED for _, claim in reachable(state))


def test_whoever_waits_is_released_within_two_events():
    """From every state with a waiting trainer: release at once, or when the reading has ended or broken."""
    for state in ALL:
        if at(state).fenced:
            ends = (
                [state]
                if state[0] is not PublicationProgress.READING
                else [
                    after(state, PublicationEvent.ALL_READ),
                    after(state, PublicationEvent.BROKE),
                ]
            )
            assert all(end is not None and after(end, PublicationEvent.RELEASE) for end in ends), state


def test_nothing_has_arrived_that_was_not_read_to_its_end():
    """Over all histories of seven events: ARRIVED comes after ALL_READ with neither BROKE nor a new START
    between, and giving up comes after a fence."""

    def go(publication: State, history: tuple[PublicationEvent, ...]) -> int:
        if len(history) == 7:
            return 1
        count = 1
        for event in PublicationEvent:
            following = after(publication, event)
            if following is None:
                continue
            if event is PublicationEvent.ARRIVED:
                moves = [
                    e
                    for e in history
                    if e in (PublicationEvent.START, PublicationEvent.ALL_READ, PublicationEvent.BROKE)
                ]
                assert moves[-2:] == [PublicationEvent.START, PublicationEvent.ALL_READ], history
            if event is PublicationEvent.GIVE_UP:
                assert PublicationEvent.FENCE in history
            count += go(following, (*history, event))
        return count

    assert go((PublicationProgress.IDLE, Claim.WORKING), ()) > 1000


@pytest.mark.parametrize(
    "event",
    [
        PublicationEvent.ALL_READ,
        PublicationEvent.ARRIVED,
        PublicationEvent.BROKE,
        PublicationEvent.RESEND,
        PublicationEvent.RELEASE,
    ],
)
def test_an_event_out_of_order_is_refused(event):
    """With the state and the event in the message, and the state as it was."""
    publication = Publication(0, [], 0.0)
    with pytest.raises(ValueError, match=f"{event.name} of weights that are IDLE and WORKING"):
        publication.advance(event)
    assert (publication.progress, publication.claim) == (PublicationProgress.IDLE, Claim.WORKING)


def test_the_trainers_standstill_is_counted_once():
    """From `waiting_since` to the first `goes_on`; a second one adds nothing."""
    publication = Publication(0, [], 0.0, stall_seconds=0.5, waiting_since=10.0)
    publication.goes_on(12.0)
    publication.goes_on(20.0)
    assert publication.stall_seconds == 2.5
