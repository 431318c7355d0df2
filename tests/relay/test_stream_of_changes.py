"""One publication over a real gloo link: as changes to whoever has the base, in full to whoever has not,
refused when it is damaged."""

import contextlib
import threading

import pytest
import torch

from laminar_hpc.cluster.links import Link
from laminar_hpc.cluster.meeting import LinkBroken
from laminar_hpc.kernels.sums import tensor_sums
from laminar_hpc.relay.chain import Changes, Stream, SumsDiffer, receive_stream, send_stream
from laminar_hpc.weights.delta import encode
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.stream import decode_header

CHUNK = 1 << 16
TENSORS = [
    ("a", (333, 77), "bfloat16"),
    ("b", (5,), "bfloat16"),
    ("c", (100_000,), "bfloat16"),
]  # chunks end inside tensors


def publication(density: float) -> tuple[torch.Tensor, Stream]:
    """The bytes of weight id 4, and id 5 as changes to it, complete at a relay that has received it."""
    generator = torch.Generator().manual_seed(0)
    manifest = layout(TENSORS, 5, 2)
    old = torch.randint(0, 256, (manifest.data_bytes,), dtype=torch.uint8, generator=generator)
    new = old.clone()
    new[torch.rand(new.shape, generator=generator) < density] ^= 1
    new[:CHUNK] = old[:CHUNK]  # a chunk in which nothing changes
    new[CHUNK : 2 * CHUNK] ^= 255  # and one in which all does
    for entry in manifest.tensors:
        entry.sum_words, entry.sum_indexed = tensor_sums(new[entry.offset : entry.offset + entry.nbytes])
    stream = Stream(manifest, new, CHUNK, complete=True)
    frames = {
        n: encode(new[at : at + CHUNK].clone(), old[at : at + CHUNK].clone(), 2)
        for n, at in enumerate(range(0, len(new), CHUNK))
    }
    stream.changes = Changes(
        4, old, {number: frame for number, frame in frames.items() if int(frame.head[0])}
    )
    return old, stream


def across(link: tuple[Link, Link], sent: Stream, old: torch.Tensor) -> tuple[Manifest, int, Stream]:
    """What the peer makes of it: (manifest, base id, stream)."""
    upstream, downstream = link
    sender = threading.Thread(target=_send, args=(upstream, sent))
    sender.start()
    manifest, chunk, base_id = decode_header(downstream.receive_bytes())
    received = Stream(manifest, torch.zeros_like(old), chunk)
    received.passed_on = 1
    if base_id is not None:
        received.changes = Changes(base_id, old)
    try:
        receive_stream(downstream, received)
    finally:
        if not received.complete:
            downstream.close()
        sender.join(10)
    return manifest, base_id, received


def _send(link: Link, stream: Stream) -> None:
    with contextlib.suppress(LinkBroken):
        send_stream(link, stream)


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
    with pytest.raises(SumsDiffer):
        across(link, sent, old)
