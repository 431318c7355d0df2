"""Requests that move between the engines of a pair in mid-answer."""

import asyncio
import json
import random
import time

import pytest
from prompts import judged

from engines import EOS, Pair
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.kv.errors import KvRefused


def greedy(pair: Pair, length: int) -> dict:
    return {
        **sampling_parameters(pair.config.sampling, 0.0, length, [EOS]),
        "ignore_eos": True,
        "stop_token_ids": [],
    }


def prompt_of(number: int, length: int = 60) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(250) for _ in range(length)]


async def decoding(
    engine: SglangServer, name: str, move: str, address: str, call: asyncio.Task | None = None
) -> bool:
    """Sends the snapshot as soon as request `name` decodes, within 60 s; `address` is the destination's.
    Returns False when `call`, the request's own, has ended before that or meanwhile."""
    deadline = time.monotonic() + 60
    while True:
        try:
            await engine.kv_send(move, name, address)
            return True
        except KvRefused as error:
            if call is not None and "ended or was retracted while its KV was sent" in str(error):
                return False
            if "is decoding here" not in str(error) or time.monotonic() > deadline:
                raise
            if call is not None and call.done():
                return False
            await asyncio.sleep(0.005)


async def detached(engine: SglangServer, name: str, move: str) -> int | None:
    """The tokens sent in all; None when request `name` has ended since its snapshot."""
    try:
        return await engine.kv_detach(move, name)
    except KvRefused as error:
        if "is decoding here" not in str(error):
            raise
        return None


async def moved(
    pair: Pair, number: int, parameters: dict, pause: float, way: str = "shm", source: int = 0
) -> tuple[Generation, Generation]:
    """The two parts of an answer of which the second is drawn by the other engine, after at most `pause`
    seconds: an answer that has ended by then is asked for again and moved earlier."""
    ours, theirs = pair.engines[source], pair.engines[1 - source]
    prompt, name, move = prompt_of(number), f"request-{number}", f"move-{number}"
    call = asyncio.create_task(ours.generate(prompt, parameters, name, "0"))
    await asyncio.sleep(pause)
    address = await theirs.kv_reserve(move, 0, len(prompt) + parameters["max_new_tokens"])
    if way == "tcp":
        address = json.dumps([inbox | {"machine": "another"} for inbox in json.loads(address)])
    sent = None
    if await decoding(ours, name, move, address, call):
        sent = await detached(ours, name, move)
    if sent is None:
        await asyncio.gather(call, ours.kv_abort(move), theirs.kv_abort(move))
        return await moved(pair, number, parameters, pause / 4, way, source)
    first = await call
    assert first.finish_reason == "moved" and sent == len(prompt) + len(first.tokens) - 1
    tokens = [*prompt, *first.tokens.tolist()]
    assert await theirs.kv_import(move, tokens) == sent
    left = {**parameters, "max_new_tokens": parameters["max_new_tokens"] - len(first.tokens)}
    second = await theirs.generate(tokens, left, name, "0")
    await asyncio.gather(ours.kv_commit(move), theirs.kv_commit(move))
    assert second.cached_tokens == sent
    return [first, second]


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
