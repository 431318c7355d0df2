"""The API key of an engine's server: a file that only this user can read, gone with its first reading."""

import os
import secrets
from pathlib import Path
from typing import Any

FILE_VARIABLE = "LAMINAR_ENGINE_KEY_FILE"


class HiddenKey(str):
    """A text that logs show as stars; SGLang logs all of its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class KeyRequired:
    """ASGI middleware around all of SGLang's server. SGLang's own (utils/auth.py:101) asks for no key for
    health checks, one of which generates a token, for metrics, OPTIONS and web sockets."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._header = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(given, self._header):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": 401})
            await send({"type": "http.response.body"})


def leave(folder: Path, key: str) -> str:
    """Writes the key for the server that is about to start; returns the path, for FILE_VARIABLE."""
    path = folder / "key"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return str(path)


def take() -> HiddenKey | None:
    """The key of this server, once; None where nobody has left one."""
    path = os.environ.pop(FILE_VARIABLE, "")
    if not path:
        return None
    key = HiddenKey(Path(path).read_text())
    os.unlink(path)
    return key
