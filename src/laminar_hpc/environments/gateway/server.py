"""The listener of a rollout rank: chat completions and token ids for its sessions, on loopback only.

    POST /sessions/ID/v1/chat/completions     GET /sessions/ID/v1/models
    POST /sessions/ID/inference/v1/generate

Each session has a key of its own, as a bearer token or as x-api-key; without it nothing is said, not even
whether the session is there.
"""

import contextlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from laminar_hpc.environments.gateway.chat import LIMITS, Rejected, events, models, parse
from laminar_hpc.environments.gateway.session import Door
from laminar_hpc.environments.gateway.tokens import parse_prompt

logger = logging.getLogger(__name__)
_THERE = "POST chat/completions and GET models under base_url, and POST inference/v1/generate beside its v1"
_INSTEAD = {
    "responses": "no Responses API, only chat completions: say set_default_openai_api('chat_completions') to "
    "openai-agents, OpenAIChatModel to pydantic-ai, use_responses_api=False to LangChain's ChatOpenAI",
    "completions": f"no legacy completions; there is {_THERE}",
}
MAX_REQUEST = 16 << 20  # bytes
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CLOSE_SECONDS = 0.2  # for answers that are on their way when all ends


class Gateway:
    """`start`, use, `close`. `max_tokens`: of a whole conversation; `branches`: as Door has it."""

    def __init__(self, max_tokens: int, branches: bool = False) -> None:
        self._max_tokens = max_tokens
        self._branches = branches
        self._sessions: dict[str, Door] = {}
        self._base = ""
        app = web.Application(client_max_size=MAX_REQUEST, middlewares=[self._refusals])
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions/{session}/inference/v1/generate", self._generate)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_route("*", "/sessions/{session}/{other:.*}", self._other)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_SECONDS)

    async def start(self) -> None:
        """Listens on any free port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._base = f"http://{host}:{port}"
        logger.info("agents find this replica at %s", self._base)

    async def close(self) -> None:
        for name in list(self._sessions):
            self._sessions.pop(name).end("the replica ends")
        await self._runner.cleanup()

    def open(self) -> Door:
        """A session with a URL and a key that nobody else has."""
        name = secrets.token_urlsafe(12)
        session = self._sessions[name] = Door(
            f"{self._base}/sessions/{name}/v1", secrets.token_urlsafe(32), self._branches
        )
        return session

    def shut(self, session: Door) -> None:
        """Shuts the session's door: its key opens nothing, an open question is refused."""
        session.end("the trajectory has ended")
        self._sessions.pop(session.url.split("/")[-2], None)

    # ---- requests ------------------------------------------------------------------------------------------

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error has a body as OpenAI's clients read it, and is noted but for limits of the run."""
        try:
            return await handler(request)
        except Rejected as error:
            why = error
        except web.HTTPException as error:
            why = Rejected(f"{request.path}: {error.reason}", error.status)
        session = self._sessions.get(request.match_info.get("session", ""))
        if session is not None and why.code not in LIMITS and why.status < 500:
            session.refusals.append(str(why))
        return _json(why.body(), why.status)

    def _session(self, request: web.Request) -> Door:
        """Raises Rejected."""
        session = self._sessions.get(request.match_info["session"])
        wanted = (session.key if session else secrets.token_urlsafe(32)).encode()
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token if scheme.lower() == "bearer" else ""
        given = request.headers.get("x-api-key", bearer).encode("utf-8", "replace")
        if not hmac.compare_digest(wanted, given) or session is None:
            raise Rejected(
                "no session with this key is here: give base_url and api_key as they came", 401, "key"
            )
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return _json(models(self._max_tokens))

    async def _other(self, request: web.Request) -> web.StreamResponse:
        """What there is instead."""
        self._session(request)
        path = request.match_info["other"]
        there = _INSTEAD.get(path.removeprefix("v1/"), f"there is {_THERE}")
        raise Rejected(f"{request.method} {path[:80]!r}: {there}", 404, "not_found")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        return _json(await session.ask(parse_prompt(await request.read())))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        chat = parse(await request.read())
        body = await session.ask(chat)
        if not chat.stream:
            return _json(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with contextlib.suppress(ConnectionResetError):  # whoever asked has gone
            await response.prepare(request)
            for event in events(body, chat.stream_usage):
                await response.write(event)
        return response


def _json(body: dict, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
