"""What moves, interruptions and the partial-response pool need of the real engine, on two SGLang servers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers.engines.pair import engine_config, hf_logprobs, make_model, reference
from helpers.engines.prompts import Ended, before_its_end, paused, until_decoding
from helpers.processes import LoopThread
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.line.messages.data import Partial
from laminar_hpc.policies.sizing import saturation_requests
from laminar_hpc.rollout.partial_response import extended, logprobs_of, tokens_of
from laminar_hpc.store.payload.layout import Logprobs, Tokens

PROMPT = [(7 * i) % 200 for i in range(40)]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}


def assert_is_of(model: Path, tokens: Sequence[int], logprobs: Sequence[float], start: int = 0) -> None:
    """The log-probs from `start` on are those of the model for exactly these tokens."""
    expected = hf_logprobs(reference(model), PROMPT, tokens)
    torch.testing.assert_close(torch.tensor(logprobs[start:]), expected[start:], atol=1e-4, rtol=0)


@pytest.fixture(autouse=True)
def first_weights(pair):
    """Other tests of the session leave others in the engines."""
    for number in (0, 1):
        pair.loop.run(pair.load(number, 0))


def test_a_stopped_request_goes_on_elsewhere(pair):
    """repack=reprefill: tokens and log-probs of both parts are those of one uninterrupted response of the
    same policy."""
    source, destination = pair.engines

    async def move(number: int) -> Partial:
        name = f"run-1-0-{number}"
        request = asyncio.create_task(source.generate(PROMPT, SAMPLING, name, "0"))
        await until_decoding(source, name, request)
        await source.abort(name)
        first = await request
        if first.finish_reason == "length":
            raise Ended
        assert first.finish_reason == "abort" and 0 < len(first.tokens) < 400
        left = {**SAMPLING, "max_new_tokens": 400 - len(first.tokens)}
        second = await destination.generate([*PROMPT, *first.tokens], left, "run-1-1-0", "0")
        return extended(extended(Partial(), first), second)

    whole = pair.loop.run(before_its_end(move))
    assert whole.count == 400 and [(s.weight_id, s.start, s.end) for s in whole.spans] == [(0, 0, 400)]
    assert_is_of(pair.models[0], tokens_of(whole), logprobs_of(whole))


def test_a_paused_request_goes_on_with_other_weights(pair):
    """pipeline.keep_kv: the engine's own spans say where the weights changed; before it the log-probs are
    those of the first weights."""
    engine = pair.engines[0]

    async def run():
        request = await paused(engine, "run-2-0", lambda name: engine.generate(PROMPT, SAMPLING, name, "0"))
        await pair.load(0, 1, paused=True)
        await engine.sums()
        await engine.resume()
        generation = await request
        await pair.load(0, 0)
        return generation

    generation = pair.loop.run(run())
    assert [s.weight_id for s in generation.spans] == [0, 1] and generation.spans[-1].end == 400
    change = generation.spans[0].end
    assert 0 < change < 400
    assert_is_of(pair.models[0], generation.tokens[:change], generation.logprobs[:change])


def test_the_decode_curve_is_measured(pair):
    """Powers of two up to the limit, each with the seconds of a step, from which repack takes its B."""
    curve = pair.loop.run(pair.engines[1].decode_curve(8, 16))
    assert [requests for requests, _ in curve] == [1, 2, 4, 8] and all(seconds > 0 for _, seconds in curve)
    assert 1 <= saturation_requests(curve) <= 8


@pytest.mark.slow
def test_increments_are_the_response(tmp_path):
    """Streamed parts, put one after the other, are a prefix of the response, and the response is the same as
    without a stream."""
    model = make_model(tmp_path / "model", 0)
    config, loop = engine_config(model), LoopThread()
    config.rollout.increment_tokens = 16
    engine, told = SglangServer(config, 0, tmp_path), ([], [])

    def on_tokens(tokens: Tokens, logprobs: Logprobs) -> None:
        told[0].extend(tokens)
        told[1].extend(logprobs)

    async def run():
        await engine.start(model, 0, seed=0)
        try:
            return await engine.generate(
                PROMPT, {**SAMPLING, "max_new_tokens": 100}, "run-3-0-0", "0", on_tokens
            )
        finally:
            await engine.stop()

    generation = loop.run(run(), 250)
    loop.close()
    assert len(generation.tokens) == 100 and [(s.weight_id, s.start, s.end) for s in generation.spans] == [
        (0, 0, 100)
    ]
    assert len(told[0]) >= 80 and told[0] == generation.tokens[: len(told[0])].tolist()
    assert told[1] == generation.logprobs[: len(told[1])].tolist()
    assert_is_of(model, generation.tokens, generation.logprobs)
