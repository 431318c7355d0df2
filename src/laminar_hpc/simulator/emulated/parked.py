"""KV caches of emulated engines in a relay's memory: as their engines send them (kv_wire.py), of which only
the numbers of tokens and bytes are kept."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.simulator.emulated import kv_wire

R = TypeVar("R")


class EmulatedPark:
    """See KvPark; `limit` counts the bytes that really cross the socket. Has an event loop of its own."""

    def __init__(self, host: str, limit: int, ranks: int) -> None:
        self._limit = limit
        self._endpoint = kv_wire.Endpoint(limit)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-park", daemon=True)
        self._thread.start()

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _kept(self, move_id: str) -> tuple[int, int]:
        offer = self._endpoint.offer(move_id)
        return (offer.tokens, offer.bytes) if offer is not None else (0, 0)

    async def _drop(self, move_id: str) -> None:
        self._endpoint.close(move_id)

    def open(self, move_id: str) -> str:
        if self._endpoint.bytes >= self._limit:
            raise KvRefused(f"KV cannot be parked: {self._limit} bytes may be (relay.parked_gigabytes)")
        return self._run(self._endpoint.open(move_id))

    def kept(self, move_id: str) -> tuple[int, int]:
        tokens, size = self._run(self._kept(move_id))
        if not tokens:
            self.drop(move_id)
        return tokens, size

    def hand_on(self, move_id: str, address: str, seconds: float) -> tuple[int, int]:
        return self._run(self._hand_on(move_id, address, seconds))

    async def _hand_on(self, move_id: str, address: str, seconds: float) -> tuple[int, int]:
        tokens, size = await self._kept(move_id)
        self._endpoint.close(move_id)
        if not tokens:
            raise KvRefused(f"KV of {move_id} is not kept here")
        await kv_wire.send(address, move_id, 0, tokens, size, seconds)
        return tokens, size

    def drop(self, move_id: str) -> None:
        self._run(self._drop(move_id))

    def close(self) -> None:
        self._run(self._endpoint.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
