"""The experts that a real SGLang sent its tokens to, as a response brings them: those that transformers
computes for the same tokens in float32, over prefix hits, a second turn and moves of the KV cache."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.engines.pair import engine_config
from helpers.processes import LoopThread
from helpers.trainer.tiny import EXPERTS, VOCAB, make_model, transformers_model
from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import RouteShape, replayed_routes
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.rollout.routes import as_rows

PROMPT = [(7 * i) % VOCAB for i in range(30)]
LENGTH = 60
LONG = 200  # of what is to move before it ends


class Engines:
    """Two engines with the same tiny mixture of experts, and the routes that transformers computes."""

    def __init__(self, folder: Path, family: str = "qwen3-moe", count: int = 2, **rollout: object) -> None:
        shape = {"initializer_range": 0.3, **EXPERTS[family]}
        self.model = make_model(folder / "model", 0, **shape)
        self.config = engine_config(self.model)
        self.config.algorithm.routing_replay = "true"
        self.config.rollout.increment_tokens = 8
        for name, value in rollout.items():
            setattr(self.config.rollout, name, value)
        found = replayed_routes(self.config, model_config(str(self.model)))
        assert found is not None
        self.shape: RouteShape = found
        self.reference = transformers_model(self.model).eval()
        self.loop = LoopThread()
        self.engines = [SglangServer(self.config, index, folder) for index in range(count)]
        self.sampling = {
            **sampling_parameters(self.config.sampling, 1.0, LENGTH, []),
            "ignore_eos": True,
            "stop_token_ids": [],
        }

    async def start(self) -> None:
        await asyncio.gather(*(engine.start(self.model, 0, seed=i) for i, engine in enumerate(self.engines)))

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    def rows(self, generation: Generation) -> np.ndarray:
        assert generation.routes is not None
        return as_rows(generation.routes, self.shape)

    def computed(self, tokens: list[int]) -> np.ndarray:
        """[tokens, layers, experts per token] sorted, by transformers."""
        found = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda *given: found.append(given[-1]))
            for layer in self.reference.model.layers
        ]
        with torch.no_grad():
            self.reference(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        logits = [out[0] if isinstance(out, tuple) else out for out in found]
        chosen = [of.view(len(tokens), -1).topk(self.shape.per_token, -1).indices for of in logits]
        return torch.stack(chosen, 1).sort(-1).values.numpy()

    def check(self, tokens: list[int], rows: np.ndarray, start: int = 0) -> None:
        """`rows` are transformers' routes of all `tokens` from `start` on but the last."""
        expected = self.computed(tokens)[start:-1]
        assert rows.shape == expected.shape and rows.dtype == np.uint8
        assert np.array_equal(np.sort(rows, -1), expected)
        assert len({row.tobytes() for row in expected}) > 5, "the same route everywhere would prove little"


@contextmanager
def running(engines: Engines) -> Iterator[Engines]:
    try:
        engines.loop.run(engines.start(), seconds=250)
        yield engines
    finally:
        engines.loop.run(engines.stop())
        engines.loop.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with running(Engines(tmp_path_factory.mktemp("routes"))) as engines:
        yield engines


def test_routes_are_those_of_the_same_tokens(engines: Engines) -> None:
    """Of prompt and response but the last token, whole and streamed; from a later token on; of a prompt that
    the prefix cache has; of a second turn behind tokens that nobody drew. None where none are asked for."""
    engine, sampling = engines.engines[0], engines.sampling

    async def ask(tokens: list[int], name: str, start: int | None, streamed: bool = False) -> Generation:
        on_tokens = (lambda *_: None) if streamed else None
        return await engine.generate(tokens, sampling, name, "0", on_tokens, routes_from=start)

    first = engines.loop.run(ask(PROMPT, "first", 0))
    tokens = [*PROMPT, *first.tokens.tolist()]
    engines.check(tokens, engines.rows(first))
    streamed = engines.loop.run(ask(PROMPT, "streamed", 0, streamed=True))
    assert streamed.cached_tokens == len(PROMPT) - 1
    engines.check([*PROMPT, *streamed.tokens.tolist()], engines.rows(streamed))
    second = engines.loop.run(ask([*tokens, 3, 1, 4], "second", len(tokens) - 1))
    assert second.cached_tokens == len(tokens) - 1
    whole = [*tokens, 3, 1, 4, *second.tokens.tolist()]
    engines.check(whole, engines.rows(second), start=len(tokens) - 1)
    assert engines.loop.run(ask(PROMPT, "none", None)).routes is None


def test_an_aborted_request_keeps_its_routes(engines: Engines) -> None:
    """Whatever it had drawn when it was stopped, streamed or not; the rest is drawn from there."""
    engine, sampling = engines.engines[0], engines.sampling | {"max_new_tokens": 150}

    async def stopped(name: str) -> Generation:
        draws = asyncio.Event()
        call = asyncio.create_task(
            engine.generate(PROMPT, sampling, name, "0", lambda *_: draws.set(), routes_from=0)
        )
        other = asyncio.create_task(engine.generate(PROMPT, sampling, "whole", "0", routes_from=0))
        await draws.wait()
        await asyncio.gather(engine.abort(name), engine.abort("whole"))
        for generation in await asyncio.gather(call, other):
            if generation.finish_reason == "abort":
                return generation
        return await stopped(name)  # both have ended by themselves, on a busy machine

    first = engines.loop.run(stopped("stopped"), seconds=60)
    tokens = [*PROMPT, *first.tokens.tolist()]
    engines.check(tokens, engines.rows(first))


def test_moved_kv_brings_its_routes(engines: Engines) -> None:
    """The first part's routes come with the request that ends as moved, the second's from the destination;
    who finds the moved prefix there has the routes that its KV was made with. Without them it is refused."""
    ours, theirs = engines.engines
    prompt = [(11 * i + 3) % VOCAB for i in range(40)]
    sampling = engines.sampling | {"max_new_tokens": LONG}

    async def detached(name: str) -> Generation:
        """What it had when it left; all of it where it ended first, which a busy machine may have it do."""
        call = asyncio.create_task(ours.generate(prompt, sampling, name, "0", None, routes_from=0))
        address = await theirs.kv_reserve(name, 0, len(prompt) + LONG)
        while not call.done():
            try:
                await ours.kv_send(name, name, address)
                await ours.kv_detach(name, name)
                break
            except KvRefused:
                await asyncio.sleep(0.005)
        return await call

    async def move(name: str, marked: bool) -> tuple[Generation, list[int], bytes]:
        first = await detached(name)
        while first.finish_reason != "moved":
            await asyncio.gather(ours.kv_abort(name), theirs.kv_abort(name))
            first = await detached(name)
        tokens, routes = [*prompt, *first.tokens.tolist()], first.routes or b""
        if marked:  # as if the source had computed others, by rounding
            routes = (np.frombuffer(routes, np.uint8) ^ 1).tobytes()
        return first, tokens, routes

    async def goes_on() -> None:
        first, tokens, routes = await move("moves", marked=True)
        engines.check(tokens, engines.rows(first))
        sent = await theirs.kv_import("moves", tokens, routes)
        left = sampling | {"max_new_tokens": LONG - len(first.tokens)}
        second = await theirs.generate(tokens, left, "moves", "0", None, routes_from=len(tokens) - 1)
        await asyncio.gather(ours.kv_commit("moves"), theirs.kv_commit("moves"))
        assert second.cached_tokens == sent == len(tokens) - 1
        engines.check([*tokens, *second.tokens.tolist()], engines.rows(second), start=len(tokens) - 1)
        hit = await theirs.generate(tokens, left, "hit", "0", None, routes_from=0)
        assert hit.cached_tokens == sent
        assert hit.routes is not None and hit.routes[: len(routes)] == routes

    async def without() -> None:
        _, tokens, routes = await move("bare", marked=False)
        with pytest.raises(KvRefused, match=rf"routes of 0 tokens came with the KV of {len(tokens) - 1}"):
            await theirs.kv_import("bare", tokens)
        assert await theirs.kv_import("bare", tokens, routes) == len(tokens) - 1
        await asyncio.gather(ours.kv_commit("bare"), theirs.kv_commit("bare"))

    engines.loop.run(goes_on(), seconds=120)
    engines.loop.run(without(), seconds=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks", "experts"), [("qwen3-moe", 2, 2), ("qwen2-moe", 2, 1), ("mixtral", 1, 1)]
)
def test_routes_of_each_family_and_layout(family: str, ranks: int, experts: int, tmp_path: Path) -> None:
    """Experts are numbered over all ranks, and a shared expert is no part of a route; requests that SGLang
    retracts for want of room have all their routes."""
    layout = {"tensor_parallel": ranks, "expert_parallel": experts, "kv_cache_tokens": 400}
    engines = Engines(tmp_path, family, 1, **layout)
    prompts = [[(i * j + 1) % VOCAB for j in range(20)] for i in range(1, 9)]

    async def ask() -> list[Generation]:
        engine = engines.engines[0]
        asked = [
            engine.generate(prompt, engines.sampling, f"r{i}", "0", None, routes_from=0)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*asked)

    with running(engines):
        for prompt, generation in zip(prompts, engines.loop.run(ask(), seconds=200), strict=True):
            engines.check([*prompt, *generation.tokens.tolist()], engines.rows(generation))
        log = engines.engines[0].log.read_text()
    assert "KV cache pool is full. Retract requests" in log or ranks > 1, "none was retracted"
