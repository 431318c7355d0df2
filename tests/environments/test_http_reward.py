"""A reward model behind a URL: what is asked and answered, against a real server on loopback that can be
as bad as servers are."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RewardConfig, RunConfig
from laminar_hpc.environments.preflight import first_call
from laminar_hpc.environments.reward_pool import RewardPool, Score

KEY = "LAMINAR_TEST_REWARD_KEY"


class Server:
    """`asked`: (path, headers, body) of each request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict, dict]] = []
        self.failures = 0  # answers with HTTP 503 before a good one

    async def score(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, dict(request.headers), body))
        if request.path == "/classify":
            return web.json_response({"embedding": [float(len(body["text"]))], "meta_info": {"id": "x"}})
        what = body["row"].get("do", "")
        if self.failures:
            self.failures -= 1
            return web.Response(status=503, text="warming up")
        if what == "hang":
            await asyncio.sleep(1000)
        if what == "redirect":
            raise web.HTTPFound("/elsewhere")
        if what == "forbidden":
            return web.Response(status=403, text="no such key")
        replies = {
            "text": "not json",
            "no reward": '{"score": 1}',
            "NaN": '{"reward": NaN}',
            "text reward": '{"reward": "1"}',
            "long": "x" * 3_000_000,
            "label": '{"reward": 1, "label": "good"}',
            "null": '{"reward": null}',
        }
        if what in replies:
            return web.Response(text=replies[what])
        return web.json_response({"reward": float(len(body["response"])), "confidence": 0.5})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", found.score)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield found
    await runner.cleanup()


async def scores(rows: list[dict], timeout: float = 5.0, **entry) -> list[Score]:
    """Of responses "a", "aa", ... with these rows, all asked for at once."""
    pool = RewardPool(
        RewardConfig(functions={"judge": entry}, timeout_seconds=timeout, score_on_failure=-7.0)
    )
    await pool.start()
    try:
        return await asyncio.gather(
            *(pool.score("a prompt", "a" * (i + 1), row) for i, row in enumerate(rows))
        )
    finally:
        await pool.close()


async def test_the_protocol(server):
    """Prompt, response and row go out as JSON; the reward and named parts come back; the key goes with it
    and only there."""
    found = await scores([{"answer": "é", "n": 1}], url=f"{server.address}/score?token=secret", weight=0.5)
    assert (found[0].reward, found[0].parts, found[0].error) == (
        0.5,
        {"judge": 1.0, "judge.confidence": 0.5},
        "",
    )
    path, headers, body = server.asked[0]
    assert path == "/score" and body == {
        "prompt": "a prompt",
        "response": "a",
        "row": {"answer": "é", "n": 1},
    }
    assert "Authorization" not in headers


async def test_the_key_is_sent_and_never_said(server, monkeypatch):
    """The service gets the key; no error shows it or the query; a refusal is not tried again."""
    monkeypatch.setenv(KEY, "very-secret")
    found = await scores(
        [{}, {"do": "forbidden"}], url=f"{server.address}/score?token=secret", api_key_env=KEY
    )
    assert server.asked[0][1]["Authorization"] == "Bearer very-secret"
    assert (
        found[1].error == f"judge: {server.address}/score: HTTP 403: no such key" and len(server.asked) == 2
    ), "not tried again"


async def test_sglang_classify(server):
    """As SGLang's /classify answers for a reward model with one output."""
    found = await scores([{}], url=f"{server.address}/classify", style="sglang")
    assert found[0].reward == len("a prompt" + "a") and server.asked[0][2] == {"text": "a prompta"}


async def test_a_server_that_is_not_ready_is_asked_again(server):
    """HTTP 503 three times costs pauses, not the reward."""
    server.failures = 3
    found = await scores([{}], url=f"{server.address}/score")
    assert (found[0].reward, found[0].error) == (1.0, "") and len(server.asked) == 4


async def test_a_bad_reply_is_an_error_of_that_call(server):
    """It is said what was wrong, and the others have their rewards. Redirects are not followed: nothing
    else is contacted."""
    bad = {
        "text": "sent no JSON: not json",
        "no reward": "no 'reward' in its reply",
        "NaN": "sent no JSON",
        "text reward": "it returned 'reward': str instead of a number",
        "label": "it returned 'label': str instead of a number",
        "null": "it returned 'reward': NoneType instead of a number",
        "long": "sent more than 1,048,576 bytes",
        "redirect": "HTTP 302",
    }
    found = await scores([{}, *({"do": do} for do in bad), {}], url=f"{server.address}/score")
    assert [s.reward for s in found] == [1.0, *[-7.0] * len(bad), len(bad) + 2.0]
    assert all(says in score.error for says, score in zip(bad.values(), found[1:-1], strict=True)), found
    assert {path for path, *_ in server.asked} == {"/score"}


async def test_the_time_limit_holds(server):
    """A server that never answers, and one that is not there: the URL is named, without its query, and the
    time is kept."""
    found = await scores([{"do": "hang"}, {}], timeout=2.0, url=f"{server.address}/score?token=secret")
    assert [s.reward for s in found] == [-7.0, 2.0] and found[0].t1 - found[0].t0 < 3.0
    assert found[0].error == f"judge: {server.address}/score: no reply in time, 1 tries in 1.5 s"
    found = await scores([{}], timeout=2.0, url="http://127.0.0.1:9/score?token=secret")
    assert (
        "http://127.0.0.1:9/score: no connection (" in found[0].error and "tries in 1.5 s" in found[0].error
    )
    assert "secret" not in json.dumps([s.error for s in found])


async def test_before_a_run(server):
    """A server that refuses, or speaks otherwise, ends the start; one that is not up yet is a warning."""

    def first(**entry) -> list[str]:
        config = RunConfig(reward=RewardConfig(functions={"judge": entry}, timeout_seconds=2.0))
        return first_call(config, "1+1=", {"answer": "2", "do": entry.pop("do", "")})

    assert await asyncio.to_thread(first, url=f"{server.address}/score") == []
    with pytest.raises(
        LaminarError, match=r"reward\.functions\.judge=.*HTTP 403: no such key; check the URL, its style"
    ):
        await asyncio.to_thread(first, url=f"{server.address}/score", do="forbidden")
    with pytest.raises(LaminarError, match="no 'reward' in its reply"):
        await asyncio.to_thread(first, url=f"{server.address}/score", do="no reward")
    (warning,) = await asyncio.to_thread(first, url="http://127.0.0.1:9/score")
    assert warning.startswith(
        "warning: reward.functions.judge=http://127.0.0.1:9/score failed on the first row"
    )
