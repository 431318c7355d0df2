"""A teacher behind a URL: what is asked and read of SGLang (the real engine, behind a stand-in for the two
paths that need its tokenizer) and of vLLM (a stand-in by its documented replies), and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from aiohttp import web

from helpers.engines.pair import hf_logprobs, reference
from helpers.processes import LoopThread
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import load_tokenizer
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.trainer.step.microbatch import Text
from laminar_hpc.trainer.step.teacher_server import TeacherServer

Handler = Callable[[web.Request, dict], "object"]


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    from megatron.core import parallel_state

    if dist.is_initialized():  # the trainer's tests have one for as long as their process lives
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@contextmanager
def serving(loop: LoopThread, paths: dict[str, Handler]) -> Iterator[str]:
    """A server on loopback; a handler gives the JSON of its reply, or an aiohttp response."""

    def answering(handler: Handler) -> Callable:
        async def answer(request: web.Request) -> web.StreamResponse:
            found = handler(request, json.loads(await request.read() or b"{}"))
            found = await found if asyncio.iscoroutine(found) else found
            return found if isinstance(found, web.StreamResponse) else web.json_response(found)

        return answer

    @asynccontextmanager
    async def up() -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        for path, handler in paths.items():
            app.router.add_route("*", path, answering(handler))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    manager = up()
    url = loop.run(manager.__aenter__())
    try:
        yield url
    finally:
        loop.run(manager.__aexit__(None, None, None))


def tokenizing(pair, more: int = 0) -> Handler:
    tokenizer = load_tokenizer(str(pair.models[0]))
    return lambda request, body: {
        "tokens": [i + more for i in tokenizer.encode(body["prompt"], add_special_tokens=False).ids]
    }


def text_of(prompt: list[int], answer: list[int], runs: list[int]) -> Text:
    response = Response(
        1,
        0,
        np.array(answer, np.int32),
        np.zeros(len(answer), np.float32),
        [],
        np.array(runs, np.uint32),
    )
    return Text(np.array(prompt, np.int32), response)


TEXTS = {
    3: text_of([5, 6, 7], [8, 9, 10, 11], [4]),
    5: text_of([40, 41], list(range(50, 70)), [3, 5, 12]),  # tokens of the environment in the middle
    6: text_of([1, 2, 3], [4, 5, 1, 9, 11], [2, 0, 0, 1, 2]),  # a branch, which begins anew with 1 9
}


def config_of(pair, **teacher: object) -> RunConfig:
    config = RunConfig()
    config.model.path = str(pair.models[0])
    for name, value in teacher.items():
        setattr(config.teacher, name, value)
    return config


def engine_forwarding(pair) -> Handler:
    process = pair.engines[0].http.process

    async def forward(request: web.Request, body: dict) -> object:
        headers = {"Authorization": f"Bearer {process.key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"http://127.0.0.1:{process.port}/generate", json=body) as reply,
        ):
            return await reply.json()

    return forward


def test_sglangs_logprobs_are_transformers(pair, world: None, loop: LoopThread) -> None:
    """Of trained tokens alone, each branch by what the model saw before it."""
    models = {"data": [{"id": "teacher", "owned_by": "sglang"}]}
    paths = {
        "/v1/models": lambda *_: models,
        "/tokenize": tokenizing(pair),
        "/generate": engine_forwarding(pair),
    }
    signs = []
    with serving(loop, paths) as url:
        found = TeacherServer(url, config_of(pair)).logprobs(TEXTS, lambda: signs.append(1))
    model = reference(pair.models[0])
    assert list(found) == list(TEXTS) and len(signs) == len(TEXTS)
    plain = hf_logprobs(model, [5, 6, 7], [8, 9, 10, 11], 1.0)
    torch.testing.assert_close(found[3], plain, atol=1e-4, rtol=0)
    whole = hf_logprobs(model, [40, 41], list(range(50, 70)), 1.0)
    torch.testing.assert_close(found[5], torch.cat((whole[:3], whole[8:])), atol=1e-4, rtol=0)
    first = hf_logprobs(model, [1, 2, 3], [4, 5], 1.0)
    branch = hf_logprobs(model, [1], [9, 11], 1.0)
    torch.testing.assert_close(found[6], torch.cat((first, branch)), atol=1e-4, rtol=0)


def test_vllms_replies_are_read(pair, world: None, loop: LoopThread, monkeypatch) -> None:
    """A token's log-prob stands under its id beside the likeliest one's. A server that is busy is asked
    again; the key is sent."""
    calls: list[str | None] = []

    def complete(request: web.Request, body: dict) -> object:
        calls.append(request.headers.get("Authorization"))
        if len(calls) == 1:
            return web.Response(status=503)
        assert body["model"] == "big" and body["max_tokens"] == 1
        entries = [{str(t): {"logprob": -t / 100}, "499": {"logprob": -0.1}} for t in body["prompt"][1:]]
        return {"choices": [{"prompt_logprobs": [None, *entries]}]}

    monkeypatch.setenv("TEACHER_KEY", "word")
    models = {"data": [{"id": "big", "owned_by": "vllm"}]}
    paths = {"/v1/models": lambda *_: models, "/tokenize": tokenizing(pair), "/v1/completions": complete}
    with serving(loop, paths) as url:
        found = TeacherServer(url, config_of(pair, api_key_env="TEACHER_KEY")).logprobs(TEXTS, lambda: None)
    assert found[3].tolist() == pytest.approx([-0.08, -0.09, -0.10, -0.11])
    assert found[6].tolist() == pytest.approx([-0.04, -0.05, -0.09, -0.11])
    assert len(calls) == 5 and set(calls) == {"Bearer word"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"/tokenize": None}, "reads a text as other tokens"),
        ({"/v1/models": lambda *_: web.Response(status=404, text="none")}, "HTTP 404: none"),
        ({"/v1/models": lambda *_: web.Response(text="<html>")}, "gave no JSON"),
        (
            {"/generate": lambda *_: {"meta_info": {"input_token_logprobs": [[None, 1], [-1.0, 2]]}}},
            "gave the log-prob of token 2 for token 8",
        ),
        ({"/generate": lambda *_: web.Response(body=b"x" * (2 << 20))}, "sent more than"),
        ({"/generate": lambda *_: web.Response(status=500)}, "has not answered within 0.5 s"),
    ],
    ids=["tokens", "path", "json", "answers", "size", "time"],
)
def test_a_server_that_cannot_teach_is_one_line(
    change: dict, words: str, pair, world: None, loop: LoopThread
) -> None:
    """On all ranks, and within the limit."""
    paths = {
        "/v1/models": lambda *_: {"data": [{"id": "teacher", "owned_by": "sglang"}]},
        "/tokenize": tokenizing(pair),
        "/generate": lambda *_: {},
        **{path: handler or tokenizing(pair, more=1) for path, handler in change.items()},
    }
    limit = 0.5 if "time" in words or "within" in words else 20.0
    with serving(loop, paths) as url, pytest.raises(LaminarError) as refused:
        TeacherServer(url, config_of(pair, timeout_seconds=limit)).logprobs({3: TEXTS[3]}, lambda: None)
    assert words in str(refused.value) and "\n" not in str(refused.value)
