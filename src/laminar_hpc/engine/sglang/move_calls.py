"""An SGLang engine's part in moving a running request's KV cache, see Engine. A move that nobody ends is
given up by either engine after MOVE_SECONDS."""

import asyncio
from typing import TypeVar

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import EngineDied
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.port_client import PortClient
from laminar_hpc.line.address import own_address

MOVE_SECONDS = 60.0  # from one step of a move to the next; also of one wait for the other side
ANSWER_SECONDS = 300.0  # for the transfer of a very long request over a slow network
R = TypeVar("R", bound=protocol.PortReply)


class MoveCalls:
    """The base of SglangServer that has its KV operations, as Engine says. `kv_stalled_seconds`: how long the
    scheduler has stood still for moves in all."""

    def __init__(self, config: RunConfig, port: PortClient) -> None:
        self.config = config
        self.port = port
        self.kv_stalled_seconds = 0.0

    async def kv_reserve(self, move_id: str, weight_id: int, tokens: int) -> str:
        host = await asyncio.to_thread(own_address, self.config.cluster.host)
        folder = self.config.relay.shm_dir
        request = protocol.KvReserve(move_id, weight_id, tokens, host, folder, MOVE_SECONDS)
        return (await self._move(request, protocol.KvReserved)).address

    async def kv_send(self, move_id: str, request_id: str, address: str) -> None:
        folder = self.config.relay.shm_dir
        request = protocol.KvSend(move_id, request_id, address, folder, MOVE_SECONDS)
        await self._move(request, protocol.KvDone)

    async def kv_detach(self, move_id: str, request_id: str) -> int:
        """See Engine. The token of the request's last step is part of its answer, but has no KV yet."""
        return (await self._move(protocol.KvDetach(move_id, request_id), protocol.KvDone)).tokens

    async def kv_send_kept(self, move_id: str, tokens: list[int], namespace: str, address: str) -> int:
        folder = self.config.relay.shm_dir
        request = protocol.KvSendKept(move_id, tokens, namespace, address, folder, MOVE_SECONDS)
        return (await self._move(request, protocol.KvDone)).tokens

    async def kv_import(self, move_id: str, tokens: list[int], routes: bytes = b"") -> int:
        return (await self._move(protocol.KvImport(move_id, tokens, routes), protocol.KvDone)).tokens

    async def kv_commit(self, move_id: str) -> None:
        await self._move(protocol.KvEnd(move_id), protocol.KvDone)

    async def kv_abort(self, move_id: str) -> None:
        await self._move(protocol.KvEnd(move_id), protocol.KvDone)

    async def _move(self, request: protocol.KvRequest, reply: type[R]) -> R:
        try:
            said = await self.port.call_beside(request, ANSWER_SECONDS)
        except EngineDied:
            raise
        except LaminarError as error:
            raise KvRefused(str(error)) from None
        if isinstance(said, protocol.OperationRefused):
            raise KvRefused(said.text)
        if isinstance(said, protocol.KvDone):
            self.kv_stalled_seconds += said.stalled
        assert isinstance(said, reply)
        return said
