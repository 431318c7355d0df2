"""A publication between two devices that work behind the host's back (fake_device.py): it passes their
memory and pinned memory on its way from slot to slot."""

from collections.abc import Iterator

import pytest
import torch
from passing import pass_on, publication

from fake_device import FakeDevice, linked
from laminar_hpc.cluster.links import Link
from laminar_hpc.cluster.meeting import LinkBroken
from laminar_hpc.relay.chain import Stream, receive_stream


@pytest.fixture
def devices() -> tuple[FakeDevice, FakeDevice]:
    return FakeDevice("GPU-one"), FakeDevice("GPU-two")


@pytest.fixture
def link(devices: tuple[FakeDevice, FakeDevice]) -> Iterator[tuple[Link, Link]]:
    ends = linked(*devices)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("chunk", [1000, 4096, 1 << 20])
def test_what_arrives_is_what_was_sent(link: tuple[Link, Link], chunk: int) -> None:
    """Of many chunks, each in a buffer that others were in before; and of the next publication, in the same
    buffers."""
    for _ in range(2):
        manifest, data = publication()
        received = pass_on(link, Stream(manifest, data, chunk, complete=True))
        assert received.complete and torch.equal(received.data, data)


def test_nothing_is_put_into_the_slot_before_its_copy_has_ended(
    devices: tuple[FakeDevice, FakeDevice], link: tuple[Link, Link]
) -> None:
    """A receiver whose copies from the device do not end gives up in time, and has said nothing of any
    byte."""
    link[1].seconds = 0.5
    copies = devices[1].copy
    devices[1].copy = lambda target, source: (devices[1].current.free.clear(), copies(target, source))
    manifest, data = publication()
    stream = Stream(manifest, torch.zeros(manifest.data_bytes, dtype=torch.uint8), 4096)
    leaving = [(link[0].give(part), part) for part in _in_device(devices[0], data, 4096)]
    with pytest.raises(LinkBroken, match="a copy from the device was not done within"):
        receive_stream(link[1], stream)
    assert leaving and stream.there == 0 and not stream.data.any()
    assert devices[1].pairs[0].aborted


def _in_device(device: FakeDevice, data: torch.Tensor, size: int) -> list[torch.Tensor]:
    parts = []
    for part in data.split(size):
        parts.append(device.empty(part.numel()))
        parts[-1].copy_(part)
    return parts
