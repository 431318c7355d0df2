import threading
from collections.abc import Iterator

import pytest
import torch

from laminar_hpc.weights.links.links import Link
from laminar_hpc.weights.links.meeting import host_store, reach_store

HOST, SECONDS = "127.0.0.1", 10.0


@pytest.fixture
def link() -> Iterator[tuple[Link, Link]]:
    """The two ends of a real gloo link: (sending, receiving)."""
    store, port = host_store(HOST, SECONDS)
    ends: dict[bool, Link] = {}

    def make(sender: bool) -> None:
        here = store if sender else reach_store(HOST, port, SECONDS)
        ends[sender] = Link(
            here, 1, 0, sender, "the peer", HOST, torch.device("cpu"), SECONDS, meet_seconds=SECONDS
        )

    other = threading.Thread(target=make, args=(False,))
    other.start()
    make(True)
    other.join()
    yield ends[True], ends[False]
    for end in ends.values():
        end.close()
