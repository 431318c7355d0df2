"""A sandbox behind a URL: a server that speaks SandboxFusion's `POST /run_code`."""

from typing import Any

import aiohttp
import msgspec

from laminar_hpc.config.rewards import shown_url
from laminar_hpc.environments.sandbox.local import SandboxFailed
from laminar_hpc.environments.sandbox.output import BoundedOutput
from laminar_hpc.environments.sandbox.protocol import Limits, Result
from laminar_hpc.machine.own_time import within
from laminar_hpc.machine.replies import read_bounded

_SLACK_SECONDS = 30.0  # beyond the code's own time: the server may have a queue
_MAX_REPLY = 64 << 20  # bytes
_TIME_OVER = "TimeLimitExceeded"


class SandboxFusion:
    """`run` as of Sandbox. `url` is the server's, without /run_code. Limits of memory and output hold."""

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        self._url = url.rstrip("/") + "/run_code"
        self._limits = limits or Limits()

    async def run(self, code: str, stdin: str = "", timeout_seconds: float = 10.0) -> Result:
        """Raises SandboxFailed when the server does not answer, or says that the failure is its own."""
        asked = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "run_timeout": timeout_seconds,
            "memory_limit_MB": self._limits.memory_bytes >> 20,
        }
        reply = await self._post(msgspec.json.encode(asked), timeout_seconds + _SLACK_SECONDS)
        ran = reply.get("run_result")
        if reply.get("status") == "SandboxError" or not isinstance(ran, dict):
            raise SandboxFailed(f"{shown_url(self._url)}: {str(reply.get('message'))[:300]}")
        timed_out = ran.get("status") == _TIME_OVER
        streams = [self._bounded(ran.get(name)) for name in ("stdout", "stderr")]
        code_given = ran.get("return_code")
        number = code_given if isinstance(code_given, int) else -9
        seconds = float(ran.get("execution_time") or timeout_seconds)
        truncated = any(stream.truncated for stream in streams)
        return Result(streams[0].text(), streams[1].text(), number, timed_out, truncated, seconds)

    async def _post(self, body: bytes, seconds: float) -> dict[str, Any]:
        where = shown_url(self._url)
        try:
            async with (
                within(seconds),
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session,
                session.post(
                    self._url, data=body, headers={"Content-Type": "application/json"}, allow_redirects=False
                ) as response,
            ):
                text = await read_bounded(response.content, _MAX_REPLY)
                if response.status != 200:
                    raise SandboxFailed(
                        f"{where}: HTTP {response.status}: {text[:200].decode(errors='replace')}"
                    )
                reply = msgspec.json.decode(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SandboxFailed(f"{where}: no answer ({str(error) or type(error).__name__})") from None
        except msgspec.DecodeError as error:
            raise SandboxFailed(f"{where}: its answer is no JSON ({error})") from None
        if not isinstance(reply, dict):
            raise SandboxFailed(f"{where}: its answer is no JSON object; is it a SandboxFusion server?")
        return reply

    def _bounded(self, text: object) -> BoundedOutput:
        output = BoundedOutput(self._limits.output_bytes)
        output.add(str(text or "").encode())
        return output
