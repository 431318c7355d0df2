"""Two-member links: bytes arrive, a dead peer breaks its own link only, every wait is bounded and names the
peer."""

import json
import multiprocessing
import os
import signal
import threading
import time

import msgspec
import pytest
import torch
import torch.distributed as dist

from laminar_hpc.weights.links import links
from laminar_hpc.weights.links.link_waits import made_unless
from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import LinkBroken, host_store, reach_store
from laminar_hpc.weights.links.transport import end_here
from laminar_hpc.weights.links.window import Window, mapped


def receiver(port, die):
    link = Link(
        reach_store("127.0.0.1", port, 10), 1, 0, False, "the trainer", "127.0.0.1", torch.device("cpu"), 10
    )
    head = link.receive_bytes()
    body = link.receive(torch.empty(1000))
    if die:
        os._exit(0)
    assert head == b"manifest" and torch.equal(body, torch.arange(1000.0))


@pytest.mark.parametrize("die", [False, True])
def test_send_and_peer_death(die):
    """Lesson of hanging weight syncs: the survivor gets an error with the peer's name within the time
    limit."""
    store, port = host_store("127.0.0.1", 10)
    peer = multiprocessing.get_context("spawn").Process(target=receiver, args=(port, die))
    peer.start()
    link = Link(store, 1, 0, True, "relay 0", "127.0.0.1", torch.device("cpu"), 10, meet_seconds=20)
    link.send_bytes(b"manifest")
    link.send(torch.arange(1000.0))
    if die:
        peer.join(20)
        started = time.monotonic()
        with pytest.raises(LinkBroken, match="relay 0"):
            for _ in range(10):
                link.send(torch.zeros(1 << 20))
        assert time.monotonic() - started < 15
    peer.join(20)
    assert peer.exitcode == 0


def test_nobody_joins():
    """A link that the other end never joins breaks in time and names who, and which epoch."""
    store, _ = host_store("127.0.0.1", 1)
    started = time.monotonic()
    with pytest.raises(LinkBroken, match="no link to relay 3 within 1 s: it did not join epoch 5"):
        Link(store, 5, 0, True, "relay 3", "127.0.0.1", torch.device("cpu"), 1)
    assert time.monotonic() - started < 10


def taker(port):
    link = Link(
        reach_store("127.0.0.1", port, 20), 1, 0, False, "the trainer", "127.0.0.1", torch.device("cpu"), 20
    )
    while True:
        link.receive(torch.empty(8 << 20, dtype=torch.uint8))


@pytest.mark.parametrize("hit", [signal.SIGSTOP, signal.SIGKILL])
def test_who_waits_leaves_a_closed_link_even_in_mid_message(hit):
    """Gloo never wakes the sender of a message whose first part only has left: it would sit out the whole
    time limit."""
    store, port = host_store("127.0.0.1", 20)
    peer = multiprocessing.get_context("spawn").Process(target=taker, args=(port,))
    peer.start()
    link = Link(
        store, 1, 0, True, "relay 0", "127.0.0.1", torch.device("cpu"), 60, meet_seconds=20, leave=True
    )
    sent, closed, flowing = [], [], threading.Event()

    def close_soon():
        assert flowing.wait(20), "the peer has taken no message"
        os.kill(peer.pid, hit)
        last = 0
        while last != len(sent):  # until the sender stands still
            last = len(sent)
            time.sleep(0.3)
        closed.append(time.monotonic())
        link.close()

    threading.Thread(target=close_soon).start()
    with pytest.raises(LinkBroken, match="relay 0"):
        while True:
            link.send(torch.zeros(8 << 20, dtype=torch.uint8))
            sent.append(time.monotonic())
            if len(sent) > 2:
                flowing.set()
    assert closed or hit == signal.SIGKILL, "who only stands still breaks no link"
    assert not closed or time.monotonic() - closed[0] < 2
    for _ in range(2):  # nothing is awaited on it any more
        with pytest.raises(LinkBroken, match="relay 0"):
            link.send(torch.zeros(8))
    peer.kill()
    peer.join(20)


def test_a_link_that_is_no_longer_wanted_is_not_awaited():
    """The other end has come to the store, and no further."""
    store, port = host_store("127.0.0.1", 20)
    there = reach_store("127.0.0.1", port, 20)
    dist.PrefixStore("laminar/7/0", there).set("here", msgspec.json.encode(end_here("")))
    started = time.monotonic()

    def make():
        return Link(store, 7, 0, True, "relay 3", "127.0.0.1", torch.device("cpu"), 60, meet_seconds=20)

    with pytest.raises(LinkBroken, match="another link takes its place"):
        made_unless(lambda: time.monotonic() - started > 0.5, make)
    assert time.monotonic() - started < 3


def window_taker(port, reaches, says):
    if not reaches:
        links.mapped = lambda ticket: None
    link = Link(
        reach_store("127.0.0.1", port, 20), 1, 0, False, "the trainer", "127.0.0.1", torch.device("cpu"), 20
    )
    for size in (1000, 700):
        target = torch.zeros(size, dtype=torch.uint8)
        with link.taken(link.take(target), target) as there:
            says.put((there is not target, there.tolist()))
    try:
        target = torch.zeros(8, dtype=torch.uint8)
        with link.taken(link.take(target), target):
            pass
    except LinkBroken as error:
        says.put(str(error))


@pytest.mark.parametrize("reaches", [True, False])
def test_chunks_stay_in_a_window_that_the_receiver_maps(reaches):
    """The other process copies from where they lie; one that cannot map it gets them over the link, from the
    same calls."""
    store, port = host_store("127.0.0.1", 20)
    context = multiprocessing.get_context("spawn")
    says = context.SimpleQueue()
    peer = context.Process(target=window_taker, args=(port, reaches, says))
    peer.start()
    window = Window(3000)
    link = Link(
        store, 1, 0, True, "relay 0", "127.0.0.1", torch.device("cpu"), 20, meet_seconds=20, window=window
    )
    before = link.bytes_sent
    for first, size in ((100, 1000), (2000, 700)):
        chunk = window.tensor[first : first + size]
        chunk.random_(0, 255)
        work = link.give(chunk)
        assert says.get() == (reaches, chunk.tolist())
        link.finish(work, chunk)
    assert 1700 <= link.bytes_sent - before < 1800
    if reaches:
        with pytest.raises(ValueError, match="do not lie in the window"):
            link.give(torch.zeros(8, dtype=torch.uint8))
        link.send(torch.tensor([2996, 8]))  # a place that is none
        assert "in place of a chunk of 8" in says.get()
    link.close()
    peer.kill()
    peer.join(20)


def test_a_window_is_known_by_its_secret():
    """The same process and descriptor on another machine would be something else."""
    window = Window(100)
    window.tensor.fill_(7)
    assert torch.equal(mapped(window.ticket), window.tensor)
    ticket = json.loads(window.ticket)
    for wrong in (
        {"secret": "AAAAAAAAAAAAAAAAAAAAAA=="},
        {"size": 99},
        {"pid": 1 << 22},
        {"descriptor": 9999},
        {"network": 1},
    ):
        assert mapped(json.dumps(ticket | wrong).encode()) is None
    assert mapped(b"") is None and mapped(b"{}") is None
    with open("/dev/zero", "rb") as other:
        assert mapped(json.dumps(ticket | {"descriptor": other.fileno()}).encode()) is None
    del window
    assert mapped(json.dumps(ticket).encode()) is None
