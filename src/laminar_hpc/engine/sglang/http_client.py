"""SGLang's HTTP interface on loopback, for server.py. Every request is bounded. A broken connection is
EngineDied when the process has ended, else RequestFailed."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from laminar_hpc.engine.interface import RequestFailed
from laminar_hpc.engine.sglang.process import EngineProcess
from laminar_hpc.machine.own_time import within

# SGLang ends its processes one after the other: a broken connection is seen before the death
DEATH_SECONDS = 1.0
_JSON = {"Content-Type": "application/json"}
_encoder = msgspec.json.Encoder(enc_hook=lambda array: array.tolist())  # of numpy


class HttpClient:
    """`process` has the port and the key; `open` comes after its start."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Lock()

    async def _turn(self) -> None:
        """Of a thousand requests that begin or end together, one goes on in each turn of the loop: whatever
        else runs in it comes between."""
        async with self._gate:
            await asyncio.sleep(0)

    def open(self) -> None:
        """Makes the session; nothing is sent."""
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{self.process.port}",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(),  # none: `within` bounds each request
            headers={"Authorization": f"Bearer {self.process.key}"},
        )

    async def close(self) -> None:
        """May be called at any time."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, seconds: float) -> Any:
        """The JSON of a reply with status 200; None when there is none within `seconds`."""
        if self._session is None or self._session.closed:
            return None
        try:
            async with within(seconds), self._session.get(path) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def post(self, path: str, payload: dict[str, Any], seconds: float) -> Any:
        """The JSON of the reply, or its text. Raises RequestFailed, EngineDied."""
        body = await self.post_for_bytes(path, payload, seconds)
        return msgspec.json.decode(body) if body[:1] in (b"{", b"[") else body.decode(errors="replace")

    async def post_for_bytes(self, path: str, payload: dict[str, Any], seconds: float) -> bytes:
        """The reply as it came; `payload` may hold arrays. Raises RequestFailed, EngineDied."""
        assert self._session is not None
        await self._turn()
        data = _encoder.encode(payload)
        try:
            async with within(seconds), self._session.post(path, data=data, headers=_JSON) as response:
                body = await response.read()
                await self._turn()
                if response.status == 200:
                    return body
        except TimeoutError:
            raise RequestFailed(f"{self.process.name} did not answer {path} within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            await self.raise_if_dead()
            broken = f"{self.process.name} broke off {path}: {type(error).__name__}: {error}"
            raise RequestFailed(broken) from None
        if response.status >= 500:
            await self.raise_if_dead()
        said = body[:300].decode(errors="replace")
        raise RequestFailed(f"{self.process.name} answered {path} with HTTP {response.status}: {said}")

    async def events(self, path: str, payload: dict[str, Any], seconds: float) -> AsyncGenerator[bytes, None]:
        """The JSON of each server-sent event of a stream, undecoded; who takes them awaits nothing else
        between two. Raises RequestFailed, EngineDied."""
        assert self._session is not None
        await self._turn()
        try:
            async with (
                within(seconds),
                self._session.post(
                    path,
                    data=_encoder.encode(payload),
                    headers=_JSON,
                    read_bufsize=1 << 24,  # an event is one line
                ) as response,
            ):
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield line[6:]
        except TimeoutError:
            raise RequestFailed(f"{self.process.name} did not end its answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            await self.raise_if_dead()
            broken = f"{self.process.name} broke off its answer: {type(error).__name__}: {error}"
            raise RequestFailed(broken) from None

    async def raise_if_dead(self) -> None:
        """Raises EngineDied when the process ends within DEATH_SECONDS."""
        try:
            async with within(DEATH_SECONDS):
                await self.process.dead.wait()
        except TimeoutError:
            return
        raise self.process.death()
