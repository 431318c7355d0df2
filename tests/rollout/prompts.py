"""Prompts, and requests for them to a pair of real engines."""

import asyncio
import time

from engines import EOS, Pair
from laminar_hpc.engine.interface import Engine, Generation, sampling_parameters
from laminar_hpc.messages.data import Partial
from laminar_hpc.rollout.work import extended, objection

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


async def until_running(engine: Engine, requests: int = 1, seconds: float = 30.0) -> None:
    """Until the engine decodes so many requests."""
    deadline = time.monotonic() + seconds
    while (now := await engine.utilization()) is None or now.running < requests:
        assert time.monotonic() < deadline, f"{engine.name} does not run {requests} requests: {now}"
        await asyncio.sleep(0.01)
