"""How KV caches travel between emulated engines: over TCP, in frames with a checksum, each charged at its
real size.

    offer = await endpoint.open(move_id)          destination: its address goes to the source
    await send(address, first, tokens, ...)       source
    offer.tokens                                  destination: what has arrived

A frame is a header (move id, first token, tokens, CRC-32 of the body) and a body of as many bytes as the
configuration lets cross.
"""

import asyncio
import contextlib
import math
import os
import struct
import zlib
from dataclasses import dataclass

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.machine.own_time import within

_HEAD = struct.Struct("<64sQQQI")
_MAX_BODY = 1 << 34
_BLOCK = 1 << 20
_DATA = os.urandom(_BLOCK)


@dataclass
class IncomingMove:
    """One move at its destination. `tokens`: how many have come, without a gap; `bytes`: of them."""

    tokens: int = 0
    bytes: int = 0


class Endpoint:
    """The destination's listener; one per engine, on a loopback port, from the first offer on. It has room
    for `limit` bytes of moves that are open."""

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._server: asyncio.Server | None = None
        self._offers: dict[str, IncomingMove] = {}

    async def open(self, move_id: str) -> str:
        """Takes frames of this move from here on; returns the address for them."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._offers.setdefault(move_id, IncomingMove())
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def offer(self, move_id: str) -> IncomingMove | None:
        return self._offers.get(move_id)

    @property
    def bytes(self) -> int:
        """That have come of the moves which are open."""
        return sum(offer.bytes for offer in self._offers.values())

    def close(self, move_id: str) -> None:
        self._offers.pop(move_id, None)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readexactly(_HEAD.size):
                name, first, count, length, checksum = _HEAD.unpack(head)
                offer = self._offers.get(name.rstrip(b"\0").decode())
                summed, left = 0, length
                while left:
                    block = await reader.read(min(left, _BLOCK))
                    if not block:
                        raise asyncio.IncompleteReadError(b"", left)
                    summed, left = zlib.crc32(block, summed), left - len(block)
                fits = offer is not None and summed == checksum and first <= offer.tokens
                fits = fits and self.bytes + length <= self._limit
                if offer is not None and fits:
                    offer.tokens = max(offer.tokens, first + count)
                    offer.bytes += length
                writer.write(b"\1" if fits else b"\0")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the source is gone; what came without a gap stays
        finally:
            writer.close()


async def send(address: str, move_id: str, first: int, count: int, body_bytes: int, seconds: float) -> None:
    """Sends tokens [first, first + count) as `body_bytes` bytes. Raises KvRefused when the destination does
    not take them in `seconds`."""
    if body_bytes > _MAX_BODY:
        raise KvRefused(
            f"KV move {move_id} refused: {body_bytes} bytes in one frame; lower emulation.wire_share"
        )
    writer = None
    try:
        async with within(seconds):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            blocks, rest = divmod(body_bytes, _BLOCK)
            checksum = 0
            for size in [_BLOCK] * blocks + [rest]:
                checksum = zlib.crc32(_DATA[:size], checksum)
            writer.write(_HEAD.pack(move_id.encode(), first, count, body_bytes, checksum))
            for size in [_BLOCK] * blocks + [rest]:
                writer.write(_DATA[:size])
                await writer.drain()
            if await reader.readexactly(1) != b"\1":
                raise KvRefused(f"KV move {move_id} refused by {address}")
    except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
        raise KvRefused(
            f"KV move {move_id}: {address} was not reached or fell silent ({type(error).__name__})"
        ) from None
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()
