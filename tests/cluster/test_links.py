"""Two-member links: bytes arrive, a dead peer breaks its own link only, every wait is bounded and names the peer."""

import multiprocessing
import os
import time

import pytest
import torch

from laminar_hpc.cluster.links import Link, LinkBroken, host_store, reach_store


def receiver(port, die):
    link = Link(reach_store("127.0.0.1", port, 10), 1, 0, False, "the trainer", "127.0.0.1", torch.device("cpu"), 10)
    head = link.receive_bytes()
    body = link.receive(torch.empty(1000))
    if die:
        os._exit(0)
    assert head == b"manifest" and torch.equal(body, torch.arange(1000.0))


@pytest.mark.parametrize("die", [False, True])
def test_send_and_peer_death(die):
    """Lesson of hanging weight syncs: the survivor gets an error with the peer's name within the time limit."""
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
    store, _ = host_store("127.0.0.1", 1)
    started = time.monotonic()
    with pytest.raises(LinkBroken, match="no link to relay 3 within 1 s: it did not join epoch 5"):
        Link(store, 5, 0, True, "relay 3", "127.0.0.1", torch.device("cpu"), 1)
    assert time.monotonic() - started < 10
