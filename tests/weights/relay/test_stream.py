"""A publication over a real two-member gloo link: what arrives is what was sent, while it goes on and is
added up; else it is said."""

import threading

import pytest
import torch

from helpers.links.passing import pass_on, publication
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.links.meeting import LinkBroken
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.relay import arriving as sums_of_what_arrives
from laminar_hpc.weights.relay.arriving import ArrivingSums
from laminar_hpc.weights.relay.chain import StreamDamaged, WeightStream, send_stream


@pytest.mark.parametrize("chunk", [4, 1000, 4096, 1 << 20])
def test_what_arrives_is_what_was_sent(link, chunk):
    """At any size of chunk: bytes, manifest and sums."""
    manifest, data = publication()
    if chunk == 4:  # tens of thousands of tiny messages prove no more than the first few
        manifest.tensors = manifest.tensors[:1]
        data = data[: manifest.data_bytes]
    received = pass_on(link, WeightStream(manifest, data, chunk, complete=True))
    assert received.complete and torch.equal(received.data, data) and received.manifest == manifest


def test_other_sums_are_refused(link):
    """docs/promises.md#verified-weights: what does not have the trainer's sums never becomes a slot."""
    manifest, data = publication()
    manifest.tensors[1].sum_indexed ^= 1
    with pytest.raises(
        StreamDamaged, match="1 tensors of weight id 3, first large, came from the peer with other sums"
    ):
        pass_on(link, WeightStream(manifest, data, 4096, complete=True))


def test_a_stream_that_breaks_breaks_what_it_goes_on_over(link):
    """The next relay must not wait for the rest: the sender is told why, whatever it waited for."""
    manifest, data = publication()
    stream = WeightStream(manifest, data, 4096)
    stream.grown(4096)

    def receive_the_beginning():
        link[1].receive_bytes()
        link[1].receive(torch.zeros(4096, dtype=torch.uint8))
        stream.broke("the link to relay 3 broke")

    receiver = threading.Thread(target=receive_the_beginning)
    receiver.start()
    with pytest.raises(LinkBroken, match="relay 3"):
        send_stream(link[0], stream)
    receiver.join(10)


@pytest.mark.parametrize("step", [1, 6, 1000, 1 << 20])
def test_sums_of_what_arrives_bit_by_bit(step):
    """Wherever chunks end, also inside a 32-bit word or a tensor, and for tensors that begin between two
    words."""
    manifest, data = publication()
    manifest.tensors, data = (manifest.tensors[:1], data[:30]) if step == 1 else (manifest.tensors, data)
    arriving = ArrivingSums(manifest, data)
    for there in (*range(step, data.numel(), step), data.numel()):
        arriving.grown(there)
    assert arriving.sums == [(entry.sum_words, entry.sum_indexed) for entry in manifest.tensors]


@pytest.mark.parametrize("step", [4, 1000, 1 << 20])
def test_what_comes_elsewhere_is_put_into_its_place_bit_by_bit(step):
    """Promise: chunks are copied and added up as they are by `grown`, wherever they end."""
    manifest, data = publication()
    manifest.tensors, data = (manifest.tensors[:2], data[:4000]) if step == 4 else (manifest.tensors, data)
    place, whole = torch.zeros_like(data), step != 4
    arriving = ArrivingSums(manifest, place)
    for first in range(0, data.numel(), step):
        arriving.put(first, data[first : first + step])
        arriving.grown(min(first + step, data.numel()))
    assert torch.equal(place, data) and len(arriving.sums) == (len(manifest.tensors) if whole else 1)
    known = [(entry.sum_words, entry.sum_indexed) for entry in manifest.tensors]
    assert arriving.sums == known[: len(arriving.sums)]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_chunk_is_read_once(monkeypatch, threads):
    """Promise: copy and sums are one pass over memory, by several threads: nothing adds up afterwards what
    lies on whole words."""
    items = (5 << 20) // 2
    manifest = layout([("a", (items,), torch.bfloat16), ("b", (3, 1000), torch.float32)], 0, 0)
    data = torch.randint(0, 256, (manifest.data_bytes,), dtype=torch.uint8)
    known = [tensor_sums(data[e.offset : e.offset + e.nbytes]) for e in manifest.tensors]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(sums_of_what_arrives, "tensor_sums", lambda *_: pytest.fail("a second pass"))
    place = torch.zeros_like(data)
    arriving = ArrivingSums(manifest, place)
    try:
        for first in range(0, data.numel(), 3 << 20):
            arriving.put(first, data[first : first + (3 << 20)])
            arriving.grown(min(first + (3 << 20), data.numel()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(place, data) and arriving.sums == known


def test_close_wakes_whoever_waits(link):
    """A neighbour that stands still holds up nobody for longer than it takes to notice."""
    threading.Timer(0.2, link[1].close).start()
    with pytest.raises(LinkBroken):
        link[1].receive_bytes(idle_seconds=60)
    with pytest.raises(LinkBroken):
        for _ in range(3):
            link[0].send_bytes(b"anything")


def test_a_link_is_closed_when_something_else_is_wanted(link):
    """Whoever waits on it gets LinkBroken, long before the time limit."""
    wanted = threading.Event()
    threading.Timer(0.2, wanted.set).start()
    with pytest.raises(LinkBroken), link[1].closed_when(wanted.is_set):
        link[1].receive_bytes(idle_seconds=60)


def test_links_measure_themselves(link):
    """Both ends know the start-up time and the pace, and learn from a transfer."""
    assert all(0 < end.start_seconds < 1 and 0 < end.seconds_per_byte < 1e-5 for end in link)
    link[0].seconds_per_byte = 1e-8
    link[0].sent(1 << 20, 1, (1 << 20) * 3e-8 + link[0].start_seconds)
    assert link[0].seconds_per_byte == pytest.approx(2e-8)
