"""One publication over a real gloo link: as changes to whoever has the base, in full to whoever has not,
refused when it is damaged."""

import pytest
import torch

from helpers.links.changes import across, publication
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.relay.chain import StreamDamaged


@pytest.mark.parametrize("density", [0.005, 0.2])
def test_changes_go_on_as_they_came(link: tuple[Link, Link], density: float) -> None:
    """To a neighbour with the base go the very frames that came, far fewer bytes than the weights."""
    old, sent = publication(density)
    frames = dict(sent.changes.frames)
    link[0].weight_id = 4
    before = link[0].bytes_sent
    _, base_id, received = across(link, sent, old)
    assert base_id == 4 and received.complete and torch.equal(received.data, sent.data)
    assert link[0].bytes_sent - before < len(old), (
        "one chunk is full, one empty, the others are smaller than full ones"
    )
    assert not sent.changes.frames and received.changes.frames.keys() == frames.keys()
    for number, frame in frames.items():
        assert all(torch.equal(a, b) for a, b in zip(frame, received.changes.frames[number], strict=True))


def test_who_has_not_had_the_base_from_here_gets_all(link: tuple[Link, Link]) -> None:
    """Its link has brought other weights, so the stream goes in full and no frame is kept."""
    old, sent = publication(0.005)
    link[0].weight_id = 3
    _, base_id, received = across(link, sent, old)
    assert base_id is None and received.complete and torch.equal(received.data, sent.data)
    assert not sent.changes.frames, "they would be kept for nobody"


@pytest.mark.parametrize("what", ["value", "places", "kind"])
def test_damaged_changes_are_refused(link: tuple[Link, Link], what: str) -> None:
    """A changed value by the sums; places and kinds that make no sense before anything is written outside the
    chunk."""
    old, sent = publication(0.005)
    link[0].weight_id = 4
    frame = sent.changes.frames[2]
    if what == "kind":
        frame.head[0] = 9
    else:
        table = (
            -(-int(frame.head[1]) * 2 // 4) * 4
        )  # behind the values: first how many changed in the first block
        frame.payload[0 if what == "value" else table] ^= 1
    with pytest.raises(StreamDamaged):
        across(link, sent, old)
