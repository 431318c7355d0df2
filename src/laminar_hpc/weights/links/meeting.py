"""How the two ends of a link meet: at a store that the sending end hosts. Used by links.py and those who make
links."""

import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.links.transport import LinkEndpoint, choose, end_here

MEET_SECONDS = 4.0  # for both ends of a new link to be there
_MEET_POLL_SECONDS = 0.01


class LinkBroken(LaminarError):
    """The other end of a link has gone or did not answer in time."""


def host_store(address: str, seconds: float) -> tuple[dist.TCPStore, int]:
    """A store that listens at `address` only, and its port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(256)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=seconds),
    )
    return store, port


def reach_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    """A client of the store at `host`:`port`. Raises LinkBroken after `seconds`."""
    try:
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
    except (dist.DistError, RuntimeError, ConnectionError) as error:
        raise LinkBroken(
            f"the store at {host}:{port} was not reached within {seconds:.0f} s ({error})"
        ) from None


def agree(
    store: dist.Store,
    sender: bool,
    wanted: str,
    device: str,
    peer: str,
    seconds: float,
    given_up: Callable[[], bool],
) -> str:
    """The transport of a link, for relay.transport=`wanted` of its sender: each end says who it is and which
    `device` it uses ("": none), the sender chooses. Raises as `await_peer` and `transport.choose`."""
    mine = end_here(device)
    if not sender:
        store.set("here", msgspec.json.encode(mine))
        store.wait(["transport"], timedelta(seconds=seconds))
        return store.get("transport").decode()
    await_peer(store, seconds, given_up)
    try:
        theirs = msgspec.json.decode(store.get("here"), type=LinkEndpoint)
    except msgspec.MsgspecError:
        raise RuntimeError("it runs another version of laminar_hpc") from None
    chosen = choose(wanted, mine, theirs, peer)
    store.set("transport", chosen)
    return chosen


def await_peer(store: dist.Store, seconds: float, given_up: Callable[[], bool]) -> None:
    """Until the receiver is there. Gloo itself would wait as long, but could not be told that it need not
    come any more."""
    until = time.monotonic() + seconds
    while not store.check(["here"]):
        if given_up() or time.monotonic() > until:
            raise RuntimeError("another link takes its place" if given_up() else "it did not come")
        time.sleep(_MEET_POLL_SECONDS)


def first_line(error: Exception) -> str:
    """Of torch's message, without the place in gloo's source that it begins with and the guesses that it ends
    with."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error).splitlines()[0]).split(". This is typically")[0][:120]
