"""SGLang's HTTP interface on loopback, for server.py. Every request is bounded. A broken connection is
EngineDied when the process has ended, else RequestFailed."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from laminar_hpc.engine.interface import RequestFailed
from laminar_hpc.engine.sglang.process import EngineProcess

# SGLang ends its processes one after the other: a broken connection is seen before the death
DEATH_SECONDS = 1.0


class HttpClient:
    """`process` has the port and the key; `open` comes after its start."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Makes the session; nothing is sent."""
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{self.process.port}",
            connector=aiohttp.TCPConnector(limit=0),
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
            async with self._session.get(path, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def post(self, path: str, payload: dict[str, Any], seconds: float) -> Any:
        """The JSON of the reply, or its text. Raises RequestFailed, EngineDied."""
        assert self._session is not None
        try:
            async with self._session.post(
                path, json=payload, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                body = await response.read()
                if response.status == 200:
                    is_json = body[:1] in (b"{", b"[")
                    return (
                        await response.json(content_type=None) if is_json else body.decode(errors="replace")
                    )
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

    async def events(
        self, path: str, payload: dict[str, Any], seconds: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each server-sent event of a stream. Raises RequestFailed, EngineDied."""
        assert self._session is not None
        try:
            async with self._session.post(
                path,
                json=payload,
                timeout=aiohttp.ClientTimeout(total=seconds),
                read_bufsize=1 << 24,  # an event is one line
            ) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])
        except TimeoutError:
            raise RequestFailed(f"{self.process.name} did not end its answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            await self.raise_if_dead()
            broken = f"{self.process.name} broke off its answer: {type(error).__name__}: {error}"
            raise RequestFailed(broken) from None

    async def raise_if_dead(self) -> None:
        """Raises EngineDied when the process ends within DEATH_SECONDS."""
        try:
            await asyncio.wait_for(self.process.dead.wait(), DEATH_SECONDS)
        except TimeoutError:
            return
        raise self.process.death()
