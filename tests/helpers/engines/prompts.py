"""Prompts, and requests for them to a pair of real engines."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from helpers.engines.pair import EOS, Pair
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.line.messages.data import Partial
from laminar_hpc.rollout.partial_response import extended, objection

R = TypeVar("R")
TRIES = 10
PROMPTS = [[(7 * i + j * j) % 250 for j in range(3 + 5 * i)] for i in range(12)]


def judged(generation: Generation, weight_id: int | None) -> str | None:
    """What a replica objects to in a response that one request gave."""
    return objection(extended(Partial(), generation), generation.finish_reason, weight_id)


def sampling(pair: Pair, temperature: float, length: int, stop: list[int] | None = None) -> dict:
    return sampling_parameters(pair.config.sampling, temperature, length, stop or [EOS])


def generate_all(pair: Pair, parameters: dict, namespace: str, engine: int = 0) -> list:
    async def run() -> list:
        calls = [
            pair.engines[engine].generate(p, parameters, f"{namespace}-{time.time()}-{i}", namespace)
            for i, p in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*calls)

    return pair.loop.run(run())


class Ended(Exception):
    """The answer was complete before what was to befall it: a machine may stand still for longer than a tiny
    model answers."""


async def before_its_end(attempt: Callable[[int], Awaitable[R]]) -> R:
    """What `attempt`, with its number, returns: another answer is begun where one has Ended."""
    for number in range(TRIES):
        try:
            return await attempt(number)
        except Ended:
            continue
    raise AssertionError(f"{TRIES} answers ended too early")


async def decodes(engine: SglangServer, name: str) -> bool:
    """Whether request `name` is prefilled and not complete; also in a paused engine."""
    with pytest.raises(KvRefused) as refused:
        await engine.kv_send(f"look-{name}", name, "nowhere")
    return "is decoding here" not in str(refused.value)


async def until_decoding(engine: SglangServer, name: str, call: asyncio.Task) -> None:
    """Until request `name` decodes, whose answer `call` awaits."""
    while not await decodes(engine, name):
        if call.done():
            raise Ended
        await asyncio.sleep(0.005)


async def paused(
    engine: SglangServer, name: str, begin: Callable[[str], Awaitable[Generation]]
) -> asyncio.Task[Generation]:
    """The answer to a request that `begin` makes, in the middle of which the engine is paused."""

    async def attempt(number: int) -> asyncio.Task[Generation]:
        call = asyncio.ensure_future(begin(f"{name}-{number}"))
        await until_decoding(engine, f"{name}-{number}", call)
        await engine.pause()
        if await decodes(engine, f"{name}-{number}"):
            return call
        await engine.resume()
        await call
        raise Ended

    return await before_its_end(attempt)
