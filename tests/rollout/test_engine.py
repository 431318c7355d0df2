"""Real SGLang behind the adapter: its numbers are transformers' numbers, its port tells the truth, its
failures are one line."""

import asyncio
import gzip
import json
import stat
import time
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
import torch
import zmq
from safetensors.torch import load_file

from helpers.engines.pair import file_sums, fill_slot, hf_logprobs, reference
from helpers.engines.prompts import (
    PROMPTS,
    Ended,
    before_its_end,
    generate_all,
    judged,
    paused,
    sampling,
    until_decoding,
)
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.weights.probe import probe_sequences

# ---- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_logprobs_are_those_of_the_sampling_temperature(pair, temperature):
    """The trainer's ratio starts at 1: returned log-probs equal transformers' at the sampling temperature,
    for a batch of mixed lengths."""
    model = reference(pair.models[0])
    for prompt, generation in zip(
        PROMPTS, generate_all(pair, sampling(pair, temperature, 24), "sampled"), strict=True
    ):
        assert generation.finish_reason in ("stop", "length") and len(generation.tokens) == len(
            generation.logprobs
        )
        expected = hf_logprobs(model, prompt, generation.tokens, temperature)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers(pair):
    """Temperature 0 is greedy decoding, token by token, also with a cached prefix (the second pass)."""
    model = reference(pair.models[0])
    for namespace in ("greedy", "greedy"):
        for prompt, generation in zip(
            PROMPTS, generate_all(pair, sampling(pair, 0.0, 12), namespace), strict=True
        ):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *generation.tokens]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == generation.tokens.tolist()


def test_a_profile_ends_by_itself(pair, tmp_path):
    """Promise: SGLang writes a trace of so many forward passes where it is told to, and answers meanwhile as
    ever."""
    pair.loop.run(pair.engines[0].profile(tmp_path / "profile"))
    until = time.monotonic() + 120
    while "Profiling done" not in pair.engines[0].log.read_text():
        assert time.monotonic() < until
        assert all(len(one.tokens) for one in generate_all(pair, sampling(pair, 1.0, 60), "profiled"))
    (trace,) = (tmp_path / "profile").glob("engine0*TP-0*.trace.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)


def test_the_stop_token_is_part_of_the_response(pair):
    """What ended a response was drawn by the policy: it is trained on, with its log-prob."""
    greedy = generate_all(pair, sampling(pair, 0.0, 12), "stop")[0]
    stop = next(token for token in greedy.tokens if token != greedy.tokens[0])
    ended = generate_all(pair, sampling(pair, 0.0, 12, [stop]), "stop")[0]
    assert ended.finish_reason == "stop"
    assert ended.tokens.tolist() == greedy.tokens[: np.argmax(greedy.tokens == stop) + 1].tolist()
    assert ended.logprobs == pytest.approx(greedy.logprobs[: len(ended.tokens)], abs=1e-5)


def test_probe_scores_equal_transformers(pair):
    """The probe that accompanies every weight id: 124 log-probs, of tokens 1.. given the prefix."""
    model, sequences = reference(pair.models[0]), probe_sequences(500)
    scores = pair.loop.run(pair.engines[0].score(sequences, "probe"))
    assert sum(map(len, scores)) == 124
    for sequence, values in zip(sequences, scores, strict=True):
        torch.testing.assert_close(
            torch.tensor(values), hf_logprobs(model, sequence[:1], sequence[1:]), atol=1e-4, rtol=0
        )


def test_an_engine_imports_no_megatron(pair):
    """SGLang's debugging dumper would, and Weights & Biases with it: half a minute of each scheduler's start,
    for nothing."""
    log = (pair.models[0].parent / "logs/engine0.log").read_text()
    assert "server_args=" in log and "Megatron" not in log


# ---- the port ----------------------------------------------------------------------------------------------


def test_sums_of_live_parameters_are_those_of_the_file_and_change_with_a_load(pair, slots):
    """docs/promises.md#verified-weights rests on this: the sums are taken over what the engine computes
    with, under Hugging Face names. The load tells the same
    sums; its id is that of the next tokens; what was cached is forgotten."""
    engine = pair.engines[1]
    for number in (1, 0):
        directory, _ = fill_slot(slots, pair.models[number], number, 0)
        told = pair.loop.run(engine.load_weights(directory, number))
        assert told == pair.loop.run(engine.sums()) == file_sums(pair.models[number])
        generation = generate_all(pair, sampling(pair, 0.0, 4), f"load{number}", engine=1)[0]
        assert [(span.weight_id, span.start, span.end) for span in generation.spans] == [(number, 0, 4)]
        assert judged(generation, number) is None and "instead of 7" in judged(generation, 7)
    shapes = {name: list(tensor.shape) for name, tensor in load_file(pair.models[0] / WEIGHTS_FILE).items()}
    assert {t.name: t.shape for t in pair.loop.run(engine.layout())} == shapes
    assert {t.dtype for t in pair.loop.run(engine.layout())} == {"float32"}


def test_a_tied_head_is_listed_once():
    """A tied lm_head is no tensor of the Hugging Face file, so it must be none of the engine's either."""
    from laminar_hpc.engine.sglang.plugin.live_weights import canonical_views

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens = torch.nn.Embedding(64, 8)  # 60 tokens, padded to 64
    model.lm_head = model.model.embed_tokens
    config = type(
        "Config", (), {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8, "vocab_size": 60}
    )
    assert [(held.name, tuple(held.view.shape)) for held in canonical_views(model, config)] == [
        ("model.embed_tokens.weight", (60, 8))
    ]


def test_the_port_answers_an_idle_engine_in_milliseconds(pair):
    """--sleep-on-idle lets the scheduler sleep up to a second; the port wakes it."""

    async def ping() -> float:
        await asyncio.sleep(1.2)  # the scheduler is asleep by then
        t0 = time.monotonic()
        await pair.engines[0].ping(seconds=5)
        return time.monotonic() - t0

    assert sorted(pair.loop.run(ping()) for _ in range(3))[1] < 0.05


def test_the_port_refuses_what_is_not_a_request_and_lives_on(pair):
    """Nothing is unpickled: a frame is one of the port's structs, or is refused."""
    path = Path(protocol.socket_path(str(pair.engines[0].process.socket_path), 0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{path}")
        for frame in (b"", b"\x80\x04K\x01.", protocol.encode(protocol.OperationRefused("not a request"))):
            socket.send(frame)
            assert socket.poll(5000)
            assert isinstance(protocol.decode_reply(socket.recv()), protocol.OperationRefused)
    pair.loop.run(pair.engines[0].ping())


def test_cached_kv_is_apart_by_weight_id(pair):
    """Promise: a prefix that was computed with other weights is never reused, however alike the prompts
    are."""
    engine, prompt = pair.engines[0], list(range(100, 180))

    def cached(namespace: str) -> int:
        payload = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 2, "temperature": 0.0},
            "extra_key": namespace,
        }
        return pair.loop.run(engine.http.post("/generate", payload, 60))["meta_info"]["cached_tokens"]

    assert cached("id-41") == 0 and cached("id-41") > len(prompt) // 2
    assert cached("id-42") == 0, "the same prompt under another weight id"


def test_the_load_is_told_while_it_generates(pair):
    """Promise: running requests, queue and KV use are the engine's own, cost some milliseconds, and are None
    once it is gone."""
    engine, parameters = (
        pair.engines[0],
        {**sampling(pair, 1.0, 400), "ignore_eos": True, "stop_token_ids": []},
    )

    async def look(number: int) -> tuple:
        calls = [
            asyncio.create_task(engine.generate([7, 8, 9 + i], parameters, f"load-{number}-{i}", "load"))
            for i in range(6)
        ]
        seen, seconds = [], []
        while not any(call.done() for call in calls):
            await asyncio.sleep(0.1)
            t0 = time.monotonic()
            seen.append(await engine.utilization())
            seconds.append(time.monotonic() - t0)
        await asyncio.gather(*calls)
        if len(seconds) < 3:
            raise Ended
        return seen, sorted(seconds)[len(seconds) // 2]

    seen, median = pair.loop.run(before_its_end(look))
    busiest = max((load for load in seen if load), key=lambda load: load.kv_tokens)
    assert busiest.running == 6 and busiest.queued == 0 and busiest.kv_tokens > 100
    assert busiest.kv_capacity == pair.config.rollout.kv_cache_tokens
    assert median < 0.25, "a look takes milliseconds on an idle machine"
    assert pair.loop.run(SglangServer(pair.config, 9, Path("/nowhere")).utilization()) is None


def test_the_engine_is_private(pair):
    """Loopback only, a key for every request, and the key stands in no process list."""
    process = pair.engines[0].process
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(everyone) == 3 and not any(process.key in " ".join(p.cmdline()) for p in everyone)
    listening = [c for p in everyone for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
    assert stat.S_IMODE(pair.engines[0].log.stat().st_mode) == 0o600
    assert not any(process.key in value for p in everyone for value in p.environ().values())
    logged = pair.engines[0].log.read_text()
    assert process.key not in logged and "'api_key': '***'" in logged
    assert not (process.folder / "key").exists()


def test_no_request_of_any_kind_is_answered_without_the_key(pair):
    """SGLang lets health checks, one of which generates a token, metrics and web sockets pass; here each
    wants the key, and who has it is told of the engine's health."""
    process = pair.engines[0].process
    paths = ("/health", "/health_generate", "/ready", "/metrics", "/metrics/", "/", "/nowhere")
    asked = [*(("GET", path) for path in paths), ("POST", "/generate"), ("OPTIONS", "/generate")]

    async def statuses(key: str) -> list[int]:
        found, headers = [], {"Authorization": key} if key else {}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{process.port}", headers=headers) as http:
            for method, path in asked:
                async with http.request(method, path) as response:
                    found.append(response.status)
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect("/v1/realtime")
        assert refused.value.status in (401, 403)  # uvicorn without a library for web sockets: 401
        return found

    for key in ("", "Bearer ", f"Bearer {process.key[:-1]}", process.key):
        assert pair.loop.run(statuses(key)) == [401] * len(asked)
    asked = [("GET", "/health_generate"), ("GET", "/nowhere")]

    async def with_key() -> list[int]:
        headers = {"Authorization": f"Bearer {process.key}"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{process.port}", headers=headers) as http:
            return [(await http.request(method, path)).status for method, path in asked]

    assert pair.loop.run(with_key()) == [200, 404]


def test_a_response_of_two_weight_ids_is_seen(pair, slots):
    """docs/promises.md#one-policy: a response during which the weights changed is refused. Both ids
    are named."""
    engine, (directory, _) = pair.engines[1], fill_slot(slots, pair.models[0], 10, 0)

    async def mixed():
        parameters = sampling(pair, 1.0, 400) | {"ignore_eos": True, "stop_token_ids": []}
        await engine.load_weights(directory, 10)
        request = await paused(
            engine, "mixed", lambda name: engine.generate(PROMPTS[3], parameters, name, "10")
        )
        payload = {"model_path": str(pair.models[1]), "weight_version": "11", "flush_cache": False}
        await engine.http.post("/update_weights_from_disk", payload, 10)
        await engine.resume()
        return await request

    generation = pair.loop.run(mixed())
    pair.loop.run(engine.flush())
    ids = [10, 11]
    assert [span.weight_id for span in generation.spans] == ids and len(generation.tokens) == 400
    assert judged(generation, 10) == f"generated with weight ids {ids} instead of 10"


def test_an_aborted_response_is_refused(pair):
    """What an abort leaves is no response to train on."""
    engine = pair.engines[0]

    async def aborted(number: int):
        parameters = sampling(pair, 1.0, 1500) | {"ignore_eos": True, "stop_token_ids": []}
        request = asyncio.create_task(engine.generate(PROMPTS[3], parameters, f"gone-{number}", "0"))
        await until_decoding(engine, f"gone-{number}", request)
        await engine.abort(f"gone-{number}")
        generation = await request
        if generation.finish_reason == "length":
            raise Ended
        return generation

    assert "abort" in judged(pair.loop.run(before_its_end(aborted)), 0)
