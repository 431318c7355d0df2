"""Responses come out of SGLang as columns: exactly its tokens and log-probs, without a JSON list for each."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.engines.pair import Pair
from helpers.engines.prompts import PROMPTS, Ended, before_its_end, sampling, until_decoding
from laminar_hpc.engine.interface import RequestFailed
from laminar_hpc.engine.sglang.plugin import columns as plugin
from laminar_hpc.engine.sglang.replies import GenerateReply, columns, decode, parse_generation

LENGTH = 400


def request(pair: Pair, **fields: object) -> dict:
    """A greedy one of exactly LENGTH tokens."""
    parameters = sampling(pair, 0.0, LENGTH) | {"ignore_eos": True, "stop_token_ids": []}
    return {
        "input_ids": np.array(PROMPTS[2], np.int32),
        "sampling_params": parameters,
        "return_logprob": True,
        "extra_key": "columns",
    } | fields


def test_columns_are_what_sglang_says(pair):
    """Promise: bit by bit SGLang's own tokens and log-probs, in 11 bytes a token instead of 40. A request for
    other log-probs too is answered by SGLang as ever."""
    http = pair.engines[0].http

    async def both() -> tuple[bytes, bytes]:
        await http.post_for_bytes("/generate", request(pair), 60)  # the same cached prefix for both
        ours = await http.post_for_bytes("/generate", request(pair), 60)
        return ours, await http.post_for_bytes("/generate", request(pair, top_logprobs_num=1), 60)

    ours, own = pair.loop.run(both())
    generation, expected = parse_generation([decode(ours)]), json.loads(own)
    pairs = expected["meta_info"]["output_token_logprobs"]
    assert generation.tokens.dtype == np.int32 and generation.logprobs.dtype == np.float32
    assert generation.tokens.tolist() == expected["output_ids"] == [token for _, token, _ in pairs]
    assert len(pairs) == LENGTH and generation.logprobs.tolist() == [value for value, _, _ in pairs]
    assert len(ours) < 11 * LENGTH + 1000


def test_events_of_a_stream_hold_what_is_new(pair):
    """Promise: put together they are the response, also of a request that is aborted half way."""
    engine = pair.engines[0]

    async def streamed(name: str) -> list:
        payload = request(pair, rid=name, stream=True)
        payload["sampling_params"] |= {"stream_interval": 16}
        return [decode(event) async for event in engine.http.events("/generate", payload, 60)]

    async def run() -> tuple:
        async def cut(number: int) -> GenerateReply:
            asked = request(pair, rid=f"cut-{number}")
            call = asyncio.create_task(engine.http.post_for_bytes("/generate", asked, 60))
            await until_decoding(engine, f"cut-{number}", call)
            await engine.abort(f"cut-{number}")
            reply = decode(await call)
            if parse_generation([reply]).finish_reason == "length":
                raise Ended
            return reply

        whole = decode(await engine.http.post_for_bytes("/generate", request(pair), 60))
        return whole, await streamed("all"), await before_its_end(cut)

    whole, events, cut = pair.loop.run(run())
    expected = parse_generation([whole])
    assert len(events) > 2
    assert np.concatenate([columns(e.meta_info)[0] for e in events]).tolist() == expected.tokens.tolist()
    assert parse_generation(events).logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    part = parse_generation([cut])
    assert part.finish_reason == "abort" and len(part.tokens) == len(part.logprobs) < LENGTH
    assert part.tokens.tolist() == expected.tokens[: len(part.tokens)].tolist()


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"laminar_tokens": "AAAA", "laminar_logprobs": ""}, "log-probs of other tokens"),
        ({}, "the engine's reply has no columns"),
        (
            {"laminar_tokens": "AAAAAA==", "laminar_logprobs": "AAAAAA=="},
            "broke off its answer after 1 tokens",
        ),
        ({"laminar_tokens": "?", "laminar_logprobs": ""}, "is no response"),
        (None, "is no response .*: .*too long"),
    ],
)
def test_other_replies_are_refused_in_one_line(meta, says):
    """Promise: tokens and log-probs that do not belong together are no response, nor is an error's text."""
    body = json.dumps({"error": "the prompt is too long"} if meta is None else {"meta_info": meta})
    with pytest.raises(RequestFailed, match=says) as caught:
        parse_generation([decode(body.encode())])
    assert "\n" not in str(caught.value)


def output(tokens: list[int], drawn: list[int]) -> SimpleNamespace:
    """What the scheduler says of one request."""
    logprobs = [-token / 8 for token in drawn]
    return SimpleNamespace(
        output_ids=[tokens], output_token_logprobs_idx=[drawn], output_token_logprobs_val=[logprobs]
    )


def asked(stream: bool) -> SimpleNamespace:
    """SGLang's state of a request."""
    wish = {"logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": None}
    return SimpleNamespace(obj=SimpleNamespace(stream=stream, **wish), out_list=[])


def told(state: SimpleNamespace, message: SimpleNamespace | None, finish_reason: dict | None = None) -> dict:
    """The meta_info that a reply gets; its tokens are taken out of the message."""
    meta: dict = {"finish_reason": finish_reason}
    if message is None:
        plugin.show(pytest.fail, None, meta, state, 0, None, False)
    else:
        plugin.collect(pytest.fail, None, meta, state, 0, None, False, message, 0)
        assert not len(message.output_ids[0])
    return meta


def tokens_of(meta: dict) -> list[int]:
    return columns(decode(json.dumps({"meta_info": meta}).encode()).meta_info)[0].tolist()


def test_events_that_wait_are_not_lost():
    """Promise: SGLang sends only the last of the events that wait for a slow connection; it holds the tokens
    of all of them, and the next event none of them again."""
    state = asked(stream=True)
    state.out_list.append(told(state, output([1, 2], [1, 2])))
    state.out_list.append(told(state, output([3], [3])))
    assert tokens_of(state.out_list[-1]) == [1, 2, 3]
    state.out_list = []  # sent
    state.out_list.append(told(state, output([4], [4])))
    assert tokens_of(state.out_list[-1]) == [4]
    assert tokens_of(told(state, None, {"type": "abort"})) == [4]
    state.out_list = []
    assert tokens_of(told(state, None, {"type": "abort"})) == []


def test_a_reply_holds_all_and_only_what_belongs_together():
    """Promise: a reply that is not streamed holds all that came, also when it ends by an abort; log-probs of
    other tokens make it a reply that is refused."""
    state = asked(stream=False)
    assert told(state, output([1, 2], [1, 2])) == {"finish_reason": None}
    assert tokens_of(told(state, output([3], [3]), {"type": "stop"})) == [1, 2, 3]
    assert tokens_of(told(state, None, {"type": "abort"})) == [1, 2, 3]
    with pytest.raises(RequestFailed, match="4 tokens with log-probs of other tokens"):
        tokens_of(told(state, output([4], [5]), {"type": "stop"}))
