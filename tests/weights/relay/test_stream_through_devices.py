"""A publication between two devices that work behind the host's back (fake_device.py): it passes their
memory and pinned memory on its way from slot to slot."""

import pytest
import torch

from helpers.links import changes
from helpers.links.fake_device import FakeDevice
from helpers.links.passing import pass_on, publication
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import LinkBroken
from laminar_hpc.weights.links.staging import RECEIVING, SENDING
from laminar_hpc.weights.relay import chain
from laminar_hpc.weights.relay.chain import WeightStream, receive_stream


@pytest.mark.parametrize("chunk", [1000, 4096, 1 << 20])
def test_what_arrives_is_what_was_sent(device_link: tuple[Link, Link], chunk: int) -> None:
    """Of many chunks, each in a buffer that others were in before; and of the next publication, in the same
    buffers."""
    for _ in range(2):
        manifest, data = publication()
        received = pass_on(device_link, WeightStream(manifest, data, chunk, complete=True))
        assert received.complete and torch.equal(received.data, data)


def test_nothing_is_put_into_the_slot_before_its_copy_has_ended(
    devices: tuple[FakeDevice, FakeDevice], device_link: tuple[Link, Link]
) -> None:
    """A receiver whose copies from the device do not end gives up in time, and has said nothing of any
    byte."""
    device_link[1].seconds = 0.5
    copies = devices[1].copy
    devices[1].copy = lambda target, source: (devices[1].current.free.clear(), copies(target, source))
    manifest, data = publication()
    stream = WeightStream(manifest, torch.zeros(manifest.data_bytes, dtype=torch.uint8), 4096)
    leaving = [(device_link[0].give(part), part) for part in _in_device(devices[0], data, 4096)]
    with pytest.raises(LinkBroken, match="a copy from the device was not done within"):
        receive_stream(device_link[1], stream)
    assert leaving and stream.there == 0 and not stream.data.any()
    assert devices[1].pairs[0].aborted


def test_changes_arrive_while_earlier_ones_are_put_on_top(
    devices: tuple[FakeDevice, FakeDevice], device_link: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: changes pass the same staging as full chunks: they are equal at the end, the next frame is
    asked for before one is put on top of the base, and no memory of the device is taken for each."""
    old, sent = changes.publication(0.01)
    frames, device_link[0].weight_id, order = dict(sent.changes.frames), 4, list[str]()
    receiver, put = device_link[1], chain.apply
    post = receiver.post
    monkeypatch.setattr(
        receiver, "post", lambda target: (devices[1].holds(target) and order.append("ask"), post(target))[1]
    )
    monkeypatch.setattr(chain, "apply", lambda *words: (order.append("put"), put(*words))[1])
    taken = [len(device._places) for device in devices]
    _, base_id, received = changes.across(device_link, sent, old)
    assert base_id == 4 and received.complete and torch.equal(received.data, sent.data)
    assert order.count("ask") == order.count("put") == -(-len(old) // changes.CHUNK)
    assert order[:5] == ["ask", "ask", "put", "ask", "put"]
    assert [len(d._places) - before for d, before in zip(devices, taken, strict=True)] == [SENDING, RECEIVING]
    for number, frame in received.changes.frames.items():
        assert all(torch.equal(a, b) for a, b in zip(frame, frames[number], strict=True))


def _in_device(device: FakeDevice, data: torch.Tensor, size: int) -> list[torch.Tensor]:
    parts = []
    for part in data.split(size):
        parts.append(device.empty(part.numel()))
        parts[-1].copy_(part)
    return parts
