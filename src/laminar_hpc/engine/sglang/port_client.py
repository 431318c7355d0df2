"""Speaks with our plugin inside SGLang (plugin/port.py) from the rollout worker's event loop. Every call has
a time limit; the engine's death ends it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.process import EngineProcess
from laminar_hpc.machine.own_time import within

T = TypeVar("T")
R = TypeVar("R", bound=protocol.PortReply)


class PortClient:
    """The ports of an engine's tensor-parallel ranks; used after the start of `process`."""

    def __init__(self, process: EngineProcess, ranks: int) -> None:
        self.process = process
        self.ranks = ranks
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._turn = asyncio.Lock()

    async def call(self, request: protocol.PortRequest, reply: type[R], seconds: float) -> list[R]:
        """Each rank's `reply`, in their order, one call at a time. Raises LaminarError when a rank refuses or
        does not answer within `seconds`, and EngineDied."""
        return await self._unless_dead(self._call(request, reply, seconds))

    async def call_beside(self, request: protocol.KvRequest, seconds: float) -> protocol.AnyReply:
        """As `call`, for long operations: beside others, a refusal is a reply, rank 0 answers for all."""
        return await self._unless_dead(self._call_beside(request, seconds))

    async def _call(self, request: protocol.PortRequest, reply: type[R], seconds: float) -> list[R]:
        async with self._turn:
            if not self._sockets:
                self._sockets = [self._connected(rank) for rank in range(self.ranks)]
            # the first rank wakes the others up, so they must have theirs by then
            for socket in reversed(self._sockets):
                await socket.send(protocol.encode(request))
            replies: list[R] = []
            try:
                async with within(seconds):
                    while (rank := len(replies)) < self.ranks:
                        replies.append(await self._receive(rank, request, reply))
            except TimeoutError:
                self._drop()  # a late reply must not answer the next request
                raise self._late(request, rank, seconds) from None
            return replies

    async def _receive(self, rank: int, request: protocol.PortRequest, reply: type[R]) -> R:
        name, said = type(request).__name__, protocol.decode_reply(await self._sockets[rank].recv())
        if not isinstance(said, reply):
            self._drop()  # with the other ranks' replies, which nobody has read
            why = (
                said.text
                if isinstance(said, protocol.OperationRefused)
                else f"it answered {type(said).__name__}"
            )
            raise LaminarError(f"the engine refused {name}: {why}")
        return said

    async def _call_beside(self, request: protocol.KvRequest, seconds: float) -> protocol.AnyReply:
        socket = self._connected(0)
        try:
            await socket.send(protocol.encode(request))
            async with within(seconds):
                return protocol.decode_reply(await socket.recv())
        except TimeoutError:
            raise self._late(request, 0, seconds) from None
        finally:
            socket.close(linger=0)

    async def _unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        call, death = asyncio.create_task(work), asyncio.create_task(self.process.dead.wait())
        try:
            await asyncio.wait((call, death), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self.process.death()
            return call.result()
        finally:
            call.cancel()
            death.cancel()

    def _late(self, request: protocol.PortRequest, rank: int, seconds: float) -> LaminarError:
        name, path = type(request).__name__, self._path(rank)
        return LaminarError(f"the engine did not answer {name} on {path} within {seconds:g} s")

    def _path(self, rank: int) -> str:
        return protocol.socket_path(str(self.process.socket_path), rank)

    def _connected(self, rank: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.REQ, socket_class=zmq.asyncio.Socket)
        socket.linger = 0
        socket.connect(f"ipc://{self._path(rank)}")
        return socket

    def _drop(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = []

    def close(self) -> None:
        """May be called at any time; calls under way fail."""
        self._drop()
        self._context.destroy(linger=0)
