"""A worker has its own socket and its end, whoever gives up waiting for it."""

import asyncio
import socket
import threading

import msgspec

from laminar_hpc.environments.workers.fork_server import ForkServer
from laminar_hpc.environments.workers.protocol import Forked, Reap, Spec, WorkerSetup, decode_to_server

SETUP = WorkerSetup([Spec("", "a function", "no.function", "", "tool", "")], 1.0, "")


class Turn:
    """In the place of a lock: says that somebody waits for it, until it is given."""

    def __init__(self) -> None:
        self.wanted, self.given = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        self.wanted.set()
        assert self.given.wait(60)

    def __exit__(self, *_: object) -> None: ...


def test_a_caller_that_gives_up_sends_no_other_socket() -> None:
    """It is cancelled while another fork is under way: what the server gets then is still the socket that was
    made for the worker, whose other end is closed, so that the worker ends; and then the server is told to
    end the worker's keeper too, which would stay for as long as the run."""
    server, turn = ForkServer(SETUP), Turn()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server._control, server._speaking = ours, turn  # type: ignore[assignment]

    async def give_up() -> None:
        task = asyncio.create_task(server.fork(False))
        assert await asyncio.to_thread(turn.wanted.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        another = socket.socketpair()  # has the number, if that is free
        turn.given.set()
        _, (fd,), _, _ = await asyncio.to_thread(socket.recv_fds, theirs, 1 << 16, 1)
        theirs.send(msgspec.msgpack.encode(Forked(1)))
        with socket.socket(fileno=fd) as given:
            given.settimeout(60)
            assert given.recv(1) == b""
        said = await asyncio.to_thread(theirs.recv, 1 << 16)
        assert decode_to_server(said) == Reap(1)
        for each in another:
            each.close()

    theirs.settimeout(60)
    with ours, theirs:
        asyncio.run(give_up())
