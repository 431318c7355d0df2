"""Speaks with the engine port (sglang_plugin/port.py) from the rollout worker's event loop, one request at a time, with a time limit."""

import asyncio
from pathlib import Path

import zmq
import zmq.asyncio

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.rollout.sglang_plugin import protocol


class PortClient:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._turn = asyncio.Lock()

    async def call(self, request: protocol.Request, timeout: float) -> protocol.AnyReply:
        """The engine's reply. Raises LaminarError when it refuses, or when none comes within `timeout` seconds."""
        async with self._turn:
            if self._socket is None:
                self._socket = self._context.socket(zmq.REQ, socket_class=zmq.asyncio.Socket)
                self._socket.linger = 0
                self._socket.connect(f"ipc://{self.path}")
            await self._socket.send(protocol.encode(request))
            if not await self._socket.poll(timeout * 1000):
                self._drop()  # a late reply must not answer the next request
                raise LaminarError(f"the engine did not answer {type(request).__name__} on {self.path} within {timeout:g} s")
            reply = protocol.decode_reply(await self._socket.recv())
        if isinstance(reply, protocol.Refused):
            raise LaminarError(f"the engine refused {type(request).__name__}: {reply.text}")
        return reply

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def close(self) -> None:
        self._drop()
        self._context.destroy(linger=0)
