"""Requests that move between the engines of a pair in mid-answer."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from helpers.engines.pair import EOS, Pair
from helpers.engines.prompts import Ended, before_its_end, judged
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang.server import SglangServer

R = TypeVar("R")


def greedy(pair: Pair, length: int) -> dict:
    return {
        **sampling_parameters(pair.config.sampling, 0.0, length, [EOS]),
        "ignore_eos": True,
        "stop_token_ids": [],
    }


def prompt_of(number: int, length: int = 60) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(250) for _ in range(length)]


async def decoding(engine: SglangServer, name: str, move: str, address: str, call: asyncio.Task) -> None:
    """Sends the snapshot as soon as request `name` decodes, whose answer `call` awaits; `address` is the
    destination's."""
    while True:
        try:
            return await engine.kv_send(move, name, address)
        except KvRefused as error:
            if "ended or was retracted while its KV was sent" in str(error):
                raise Ended from None
            if "is decoding here" not in str(error):
                raise
            if call.done():
                raise Ended from None
            await asyncio.sleep(0.005)


async def detached(engine: SglangServer, name: str, move: str) -> int:
    """The tokens sent in all."""
    try:
        return await engine.kv_detach(move, name)
    except KvRefused as error:
        if "is decoding here" in str(error) or "ended by itself" in str(error):
            raise Ended from None
        raise


async def in_its_middle(engines: list[SglangServer], name: str, attempt: Callable[[str], Awaitable[R]]) -> R:
    """What `attempt` returns, with a name for its request and its move: made again where the request has
    Ended."""

    async def numbered(number: int) -> R:
        try:
            return await attempt(f"{name}-{number}")
        except Ended:
            await asyncio.gather(*(engine.kv_abort(f"{name}-{number}") for engine in engines))
            raise

    return await before_its_end(numbered)


async def moved(
    pair: Pair, number: int, parameters: dict, pause: float, way: str = "shm", source: int = 0
) -> tuple[Generation, Generation]:
    """The two parts of an answer of which the second is drawn by the other engine, after at most `pause`
    seconds: an answer that has ended by then is asked for again and moved earlier."""
    ours, theirs = pair.engines[source], pair.engines[1 - source]
    prompt, pauses = prompt_of(number), itertools.chain((pause, pause / 4, pause / 16), itertools.repeat(0))

    async def attempt(move: str) -> tuple[Generation, Generation]:
        call = asyncio.create_task(ours.generate(prompt, parameters, move, "0"))
        await asyncio.sleep(next(pauses))
        address = await theirs.kv_reserve(move, 0, len(prompt) + parameters["max_new_tokens"])
        if way == "tcp":
            address = json.dumps([inbox | {"machine": "another"} for inbox in json.loads(address)])
        await decoding(ours, move, move, address, call)
        sent = await detached(ours, move, move)
        first = await call
        assert first.finish_reason == "moved" and sent == len(prompt) + len(first.tokens) - 1
        tokens = [*prompt, *first.tokens.tolist()]
        assert await theirs.kv_import(move, tokens) == sent
        left = {**parameters, "max_new_tokens": parameters["max_new_tokens"] - len(first.tokens)}
        second = await theirs.generate(tokens, left, move, "0")
        await asyncio.gather(ours.kv_commit(move), theirs.kv_commit(move))
        assert second.cached_tokens == sent
        return first, second

    return await in_its_middle(pair.engines, f"move-{number}", attempt)


async def same_answers(pair: Pair, numbers: range, length: int, way: str) -> None:
    """Greedy answers, uninterrupted and moved."""
    parameters, pauses, began = greedy(pair, length), random.Random(numbers.start), time.monotonic()
    whole = await asyncio.gather(
        *(pair.engines[n % 2].generate(prompt_of(n), parameters, f"whole-{n}", "0") for n in numbers)
    )
    early = (time.monotonic() - began) / 4  # the same answers take about as long again
    parts = await asyncio.gather(
        *(moved(pair, n, parameters, pauses.uniform(0, early), way, source=n % 2) for n in numbers)
    )
    for expected, (first, second) in zip(whole, parts, strict=True):
        assert [*first.tokens, *second.tokens] == expected.tokens.tolist()
        assert [*first.logprobs, *second.logprobs] == pytest.approx(expected.logprobs, abs=1e-5)
        assert not judged(second, 0) and [span.weight_id for span in first.spans] == [0]
