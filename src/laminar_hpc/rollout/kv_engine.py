"""One engine's part in moving a running request's KV cache to another engine of the same weights.

    address = await destination.kv_reserve(move, weight_id, tokens)
                                                            room is made; tokens: all that it may have when it
                                                            arrives
    await source.kv_send(move, request, address)            while the request decodes on
    await source.kv_detach(move, request)                   its generate(...) returns what it has,
                                                            finish_reason "moved"
    await destination.kv_import(move, prompt + response)    held against eviction
    ... generate(prompt + response, ...) on the destination
    kv_commit(move)                                         then, on both; or kv_abort(move) wherever it fails

Every failure is a KvRefused of one line, and the trajectory goes on by re-prefill from its tokens. A move
that nobody ends is given up by either engine after MOVE_SECONDS.
"""

import asyncio

from laminar_hpc.cluster.address import own_address
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.kv.errors import KvRefused
from laminar_hpc.rollout.engine_process import EngineDied
from laminar_hpc.rollout.sglang_plugin import protocol

MOVE_SECONDS = 60.0  # from one step of a move to the next; also of one wait for the other side
ANSWER_SECONDS = 300.0  # for the transfer of a very long request over a slow network


class KvEngine:
    """Mixed into SglangServer. `kv_stalled_seconds`: how long the scheduler has stood still for moves in all,
    on this engine."""

    config: RunConfig
    kv_stalled_seconds = 0.0

    async def _call(self, request: protocol.Request, seconds: float, long: bool = False) -> list:
        raise NotImplementedError

    async def _move(self, request: protocol.Request) -> protocol.AnyReply:
        try:
            replies = await self._call(request, ANSWER_SECONDS, long=True)
        except EngineDied:
            raise
        except LaminarError as error:
            raise KvRefused(str(error)) from None
        for reply in replies:
            if isinstance(reply, protocol.Refused):
                raise KvRefused(reply.text)
            self.kv_stalled_seconds += getattr(reply, "stalled", 0.0)
        return replies[0]

    async def kv_reserve(self, move_id: str, weight_id: int, tokens: int) -> str:
        """The destination makes room for `tokens` tokens and listens; returns the address that the source
        needs, which is a secret."""
        host = await asyncio.to_thread(own_address, self.config.cluster.host)
        reply = await self._move(
            protocol.KvReserve(move_id, weight_id, tokens, host, self.config.relay.shm_dir, MOVE_SECONDS)
        )
        return reply.address

    async def kv_send(self, move_id: str, request_id: str, address: str) -> None:
        """The source sends the KV of all full pages that the request has now; it decodes on."""
        await self._move(
            protocol.KvSend(move_id, request_id, address, self.config.relay.shm_dir, MOVE_SECONDS)
        )

    async def kv_detach(self, move_id: str, request_id: str) -> int:
        """The source ends the request and sends the rest; returns the number of tokens whose KV is at the
        destination.

        The request takes the step that it is in, whose token is part of its answer; should that be its last
        one, this is refused.
        """
        return (await self._move(protocol.KvDetach(move_id, request_id))).tokens

    async def kv_import(self, move_id: str, tokens: list[int]) -> int:
        """The destination takes the KV into its prefix cache, if it is of a prefix of `tokens`; returns that
        prefix's length."""
        return (await self._move(protocol.KvImport(move_id, tokens))).tokens

    async def kv_commit(self, move_id: str) -> None:
        """The engine lets go of what it holds for the move; it stays in the prefix cache until the room is
        needed."""
        await self._move(protocol.KvEnd(move_id))

    async def kv_abort(self, move_id: str) -> None:
        """The same at any other time: what is reserved is given back. An unknown move is no error."""
        await self._move(protocol.KvEnd(move_id))
