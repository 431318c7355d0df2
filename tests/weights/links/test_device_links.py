"""Links between devices that work behind the host's back (fake_device.py): in what order bytes are read and
written, whom a link holds up, and what becomes of one whose peer is gone."""

import threading
import time

import pytest
import torch

from helpers.links.fake_device import FakeDevice, linked
from laminar_hpc.config.errors import PermanentFailure
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import LinkBroken


def chunk(device: FakeDevice, value: int, size: int = 1000) -> torch.Tensor:
    memory = device.empty(size)
    memory.fill_(value)
    return memory


def test_a_chunk_may_be_overwritten_when_it_has_left(
    devices: tuple[FakeDevice, FakeDevice], device_link: tuple[Link, Link]
) -> None:
    """A send is read later than it is called; `finish` of either end means that the bytes are there."""
    sent, target = chunk(devices[0], 7), devices[1].empty(1000)
    communicator = devices[0].pairs[0]
    communicator._stream.free.clear()
    work, taken = device_link[0].give(sent), device_link[1].take(target)
    threading.Timer(0.2, communicator._stream.free.set).start()
    device_link[0].finish(work, sent)
    sent.fill_(9)
    with device_link[1].taken(taken, target) as there:
        assert there.eq(7).all()


def test_a_link_reads_what_its_caller_s_stream_writes(
    devices: tuple[FakeDevice, FakeDevice], device_link: tuple[Link, Link]
) -> None:
    """The packing is still on its way when the send is called."""
    sent, target = chunk(devices[0], 1), devices[1].empty(1000)
    packing = devices[0].stream()
    with devices[0].on(packing):
        packing.free.clear()
        packing.enqueue(lambda: sent.fill_(2))
        work = device_link[0].give(sent)
    taken = device_link[1].take(target)
    threading.Timer(0.2, packing.free.set).start()
    device_link[0].finish(work, sent)
    assert device_link[1].finish(taken, target).eq(2).all()


def test_a_link_is_made_and_used_beside_a_stream_that_stands_still(
    devices: tuple[FakeDevice, FakeDevice],
) -> None:
    """The trainer's stream is full of its backward pass: measuring a link does not wait for it, nor the
    other way round."""
    for device in devices:
        device.default.free.clear()
    ends = linked(*devices, seconds=5.0)
    for device in devices:
        device.default.free.set()
    assert all(0 < end.start_seconds < 1 for end in ends)
    for end in ends:
        end.close()


def test_a_link_that_waits_holds_up_no_other(devices: tuple[FakeDevice, FakeDevice]) -> None:
    """A relay's receiver, for which nothing comes, and its sender, which has something to send."""
    upstream, downstream = linked(*devices, seconds=5.0), linked(devices[1], devices[0], seconds=5.0)
    idle = devices[1].empty(8)
    waiting = threading.Thread(target=lambda: _receive(upstream[1], idle), daemon=True)
    waiting.start()
    sent, target = chunk(devices[1], 3), devices[0].empty(1000)
    for _ in range(3):
        work, taken = downstream[0].give(sent), downstream[1].take(target)
        downstream[0].finish(work, sent)
        assert downstream[1].finish(taken, target).eq(3).all()
    assert waiting.is_alive()
    for end in (*upstream, *downstream):
        end.close()
    waiting.join(5)
    assert not waiting.is_alive()


def _receive(link: Link, target: torch.Tensor) -> None:
    with pytest.raises(LinkBroken):
        link.receive(target)


def test_a_peer_that_is_gone_is_left_in_time_and_its_kernel_ended(
    devices: tuple[FakeDevice, FakeDevice],
) -> None:
    """A kernel waits for a dead peer for ever: the host does not, and aborts the communicator itself."""
    ends = linked(*devices)
    ends[0].seconds = 0.3
    sent = chunk(devices[0], 1)
    started = time.monotonic()
    with pytest.raises(LinkBroken, match=r"the peer broke .what was enqueued was not done within 0 s"):
        ends[0].finish(ends[0].give(sent), sent)
    assert time.monotonic() - started < 3
    assert devices[0].pairs[0].aborted
    with pytest.raises(LinkBroken, match="aborted"):
        ends[0].give(sent)
    for end in ends:
        end.close()


def test_who_waits_for_a_device_leaves_a_closed_link(device_link: tuple[Link, Link]) -> None:
    """At once, and what it waited for does not count."""
    target = device_link[1].memory(8)
    threading.Timer(0.2, device_link[1].close).start()
    started = time.monotonic()
    with pytest.raises(LinkBroken, match="the peer broke"):
        device_link[1].receive(target)
    assert time.monotonic() - started < 3


def test_no_group_of_one_device() -> None:
    """NCCL refuses two ranks on one GPU: auto takes host memory, and nccl is refused with what to do."""
    device = FakeDevice("GPU-one")
    with pytest.raises(PermanentFailure, match=r"use one GPU.*relay.transport=auto"):
        linked(device, FakeDevice("GPU-one"), seconds=1.0)
    assert not device.pairs
    ends = linked(device, FakeDevice("GPU-one"), transport="auto")
    assert [end.transport for end in ends] == ["host", "host"] and not device.pairs
    target = torch.zeros(10, dtype=torch.int64)
    work = ends[1].post(target)
    ends[0].send(torch.arange(10))
    assert ends[1].finish(work, target).tolist() == list(range(10))
    for end in ends:
        end.close()
