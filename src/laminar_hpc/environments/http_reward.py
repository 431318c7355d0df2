"""A reward model behind a URL, as an async reward function. Runs in reward workers; contacts the configured
URL and nothing else.

| style | request | reply |
|---|---|---|
| laminar | `{"prompt": text, "response": text, "row": {...}}` | `{"reward": number, ...named parts}` |
| sglang | `{"text": prompt + response}`, to SGLang's `/classify` | `{"embedding": [number], ...}` |

A connection that fails, 408, 429 and 5xx are tried again, with growing pauses, within the call's time limit.
Other answers are final. The key of `api_key_env` is sent as a bearer token and appears in no message.
"""

import asyncio
import contextlib
import os
import random

import aiohttp
import msgspec

from laminar_hpc.config.rewards import shown_url
from laminar_hpc.environments.reward_styles import NotAReward, RewardFault
from laminar_hpc.environments.workers.protocol import Call, Spec
from laminar_hpc.machine.own_time import within
from laminar_hpc.machine.replies import read_bounded

# Seconds between tries; each is twice the one before, with up to half of it more at random.
FIRST_PAUSE, MAX_PAUSE = 0.1, 2.0
# Of the call's time limit, and how much is left then, so that it is the server whose fault is told.
SHARE_OF_LIMIT, SECONDS_LEFT = 0.95, 0.5
MAX_REPLY = 1 << 20  # bytes
_AGAIN = (408, 429)


class ServerRefused(RewardFault):
    """The server will not answer this otherwise."""

    fault = "refused"


class HttpReward:
    """`await reward(call)` gives what a function of style laminar would return."""

    def __init__(self, spec: Spec, timeout_seconds: float) -> None:
        self._url = spec.url
        self._style = spec.style
        self._key_name = spec.api_key_env
        left = min(SECONDS_LEFT, timeout_seconds / 2)
        self._seconds = min(SHARE_OF_LIMIT * timeout_seconds, timeout_seconds - left)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, call: Call) -> dict:
        """Raises NotAReward, ServerRefused, or RewardFault when the time is over; each names the URL."""
        pause, tries, what = FIRST_PAUSE, 0, "no reply in time"
        body = msgspec.json.encode(self._body(call))
        with contextlib.suppress(TimeoutError):
            async with within(self._seconds):
                while True:
                    tries += 1
                    try:
                        return self._reward(await self._post(body))
                    except (aiohttp.ClientError, OSError) as error:
                        what = _words(error)
                    await asyncio.sleep(pause * random.uniform(1.0, 1.5))
                    pause = min(2 * pause, MAX_PAUSE)
        raise RewardFault(f"{shown_url(self._url)}: {what}, {tries} tries in {self._seconds:.3g} s")

    def _body(self, call: Call) -> dict:
        if self._style == "sglang":
            return {"text": call.prompt + call.response}
        return {"prompt": call.prompt, "response": call.response, "row": call.row}

    async def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key_name:
            headers["Authorization"] = f"Bearer {os.environ.get(self._key_name, '')}"
        async with self._connected().post(
            self._url, data=body, headers=headers, allow_redirects=False
        ) as reply:
            text = await read_bounded(reply.content, MAX_REPLY)
            if reply.status in _AGAIN or reply.status >= 500:
                raise aiohttp.ClientError(f"HTTP {reply.status}{_quoted(text)}")
            if reply.status != 200:
                raise ServerRefused(f"{shown_url(self._url)}: HTTP {reply.status}{_quoted(text)}")
        if len(text) > MAX_REPLY:
            raise NotAReward(f"{shown_url(self._url)} sent more than {MAX_REPLY:,} bytes")
        return text

    def _connected(self) -> aiohttp.ClientSession:
        """One session per event loop. No proxies or .netrc of the environment: only the URL is contacted."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            connector, unbounded = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout()
            self._session = aiohttp.ClientSession(connector=connector, timeout=unbounded)
            self._loop = loop
        return self._session

    def _reward(self, text: bytes) -> dict:
        try:
            reply = msgspec.json.decode(text)
        except msgspec.DecodeError:
            raise NotAReward(f"{shown_url(self._url)} sent no JSON{_quoted(text)}") from None
        if self._style == "sglang":
            values = reply.get("embedding") if isinstance(reply, dict) else None
            if not isinstance(values, list) or len(values) != 1:
                raise NotAReward(
                    f"{shown_url(self._url)}: no single score in "
                    f"its reply{_quoted(text)}; is it a reward model?"
                )
            return {"reward": values[0]}
        if not isinstance(reply, dict) or "reward" not in reply:
            raise NotAReward(f"{shown_url(self._url)}: no 'reward' in its reply{_quoted(text)}")
        return reply


def _words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.os_error.strerror or type(error).__name__})"
    return str(error) or type(error).__name__


def _quoted(text: bytes) -> str:
    """The beginning of a reply."""
    words = " ".join(text[:200].decode("utf-8", "replace").split())
    return f": {words:.80}" if words else ""
