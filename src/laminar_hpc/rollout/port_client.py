"""Speaks with the engine's ports (sglang_plugin/port.py) from the rollout worker's event loop, one request at
a time, with a time limit."""

import asyncio
import time
from pathlib import Path

import zmq
import zmq.asyncio

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.rollout.sglang_plugin import protocol


class PortClient:
    """The ports of an engine's tensor-parallel ranks."""

    def __init__(self, base: Path, ranks: int) -> None:
        self.paths = [protocol.socket_path(str(base), rank) for rank in range(ranks)]
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._turn = asyncio.Lock()

    async def call(self, request: protocol.Request, timeout: float) -> list[protocol.AnyReply]:
        """Each rank's reply, in their order. Raises LaminarError when one refuses, or when one's does not
        come within `timeout` seconds."""
        async with self._turn:
            if not self._sockets:
                self._connect()
            deadline = time.monotonic() + timeout
            # the first rank wakes the others up, so they must have theirs by then
            for socket in reversed(self._sockets):
                await socket.send(protocol.encode(request))
            return [await self._reply(rank, request, deadline, timeout) for rank in range(len(self.paths))]

    async def ask(self, request: protocol.Request, timeout: float) -> list[protocol.AnyReply]:
        """As `call`, for operations that take long: beside other calls, and refusals are among the
        replies."""
        sockets = [self._socket(path) for path in self.paths]
        try:
            for socket in reversed(sockets):
                await socket.send(protocol.encode(request))
            return [
                protocol.decode_reply(reply)
                for reply in await asyncio.wait_for(asyncio.gather(*(s.recv() for s in sockets)), timeout)
            ]
        except TimeoutError:
            raise LaminarError(
                f"the engine did not answer {type(request).__name__} on {self.paths[0]} within {timeout:g} s"
            ) from None
        finally:
            for socket in sockets:
                socket.close(linger=0)

    def _socket(self, path: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.REQ, socket_class=zmq.asyncio.Socket)
        socket.linger = 0
        socket.connect(f"ipc://{path}")
        return socket

    def _connect(self) -> None:
        self._sockets = [self._socket(path) for path in self.paths]

    async def _reply(
        self, rank: int, request: protocol.Request, deadline: float, timeout: float
    ) -> protocol.AnyReply:
        socket, name = self._sockets[rank], type(request).__name__
        if not await socket.poll(max(0.0, deadline - time.monotonic()) * 1000):
            self._drop()  # a late reply must not answer the next request
            raise LaminarError(f"the engine did not answer {name} on {self.paths[rank]} within {timeout:g} s")
        reply = protocol.decode_reply(await socket.recv())
        if isinstance(reply, protocol.Refused):
            self._drop()  # with the other ranks' replies, which nobody has read
            raise LaminarError(f"the engine refused {name}: {reply.text}")
        return reply

    def _drop(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = []

    def close(self) -> None:
        self._drop()
        self._context.destroy(linger=0)
