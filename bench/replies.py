"""Replies of an engine in the rollout worker's event loop: how long the loop stands still, and what a token
costs, with responses as columns (engine/sglang/plugin/columns.py) and as the JSON lists that SGLang writes by
itself.

    python bench/replies.py [--json PATH] [--requests 1024] [--tokens 32768]
    python bench/replies.py --real [--json PATH]      the same with SGLang on a tiny random model

The engine is emulated by a server in a process of its own, which has all replies ready and sends them when
all requests are there: more at once than an engine could. A heartbeat in the worker's loop wakes up every
10 ms. What is counted is how late it wakes, and how much CPU time the loop takes between two of its beats:
what other processes on the machine do lengthens the first only. CPU seconds are the worker's process's, from
the first byte to arrays that are judged (rollout/partial_response.py). Lists are read by json.loads.

With --real 96 requests of 512 tokens each go to SGLang, by turns of both kinds (a request for log-probs of
its prompt too is answered in lists), and the CPU seconds of SGLang's HTTP server are counted too.

Figures are medians over rounds. Goal: `heartbeat_p99_ms_columns` below 100 with 1,024 requests of 32K tokens.
"""

import asyncio
import json
import math
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import common
import numpy as np
import psutil
import pybase64
from aiohttp import web

from laminar_hpc.engine.interface import Generation
from laminar_hpc.engine.sglang.http_client import HttpClient
from laminar_hpc.engine.sglang.replies import decode, parse_generation
from laminar_hpc.line.messages.data import Partial, VersionSpan
from laminar_hpc.rollout import event_loop
from laminar_hpc.rollout.partial_response import extended, objection

BEAT_SECONDS = 0.01
LISTS_SHARE = 8  # so many times fewer requests in lists: they take gigabytes
VOCABULARY = 151_936
REAL_REQUESTS, REAL_TOKENS, REAL_ROUNDS = 96, 512, 3
COLUMNS = (
    "kind",
    "requests",
    "tokens",
    "reply_bytes_per_token",
    "heartbeat_p99_ms",
    "heartbeat_max_ms",
    "busy_p99_ms",
    "busy_max_ms",
    "worker_cpu_seconds_per_million_tokens",
    "server_cpu_seconds_per_million_tokens",
)
META = {
    "id": "0" * 32,
    "finish_reason": {"type": "length", "length": 1},
    "prompt_tokens": 100,
    "weight_version": "3",
    "cached_tokens": 0,
}


def body(tokens: int, kind: str) -> bytes:
    """A reply of so many tokens, as SGLang's server writes it."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, VOCABULARY, tokens, np.int32)
    logprobs = -draw.exponential(0.5, tokens).astype(np.float32)
    meta = META | {"weight_versions": [{"version": "3", "start": 0, "end": tokens}]}
    if kind == "columns":
        texts = {
            "laminar_tokens": pybase64.b64encode(ids.tobytes()).decode(),
            "laminar_logprobs": pybase64.b64encode(logprobs.tobytes()).decode(),
        }
        return json.dumps({"output_ids": [], "meta_info": meta | texts}, separators=(",", ":")).encode()
    pairs = [[value, token, None] for value, token in zip(logprobs.tolist(), ids.tolist(), strict=True)]
    lists = {"input_token_logprobs": [], "output_token_logprobs": pairs}
    return json.dumps({"output_ids": ids.tolist(), "meta_info": meta | lists}, separators=(",", ":")).encode()


def serve(tokens: int, pipe: Connection) -> None:
    """The emulated engine: a round of replies of one kind, when all have asked for it."""

    async def run() -> None:
        ready, waiting = asyncio.Event(), 0
        bodies = {kind: body(tokens, kind) for kind in ("columns", "lists")}

        async def generate(request: web.Request) -> web.Response:
            nonlocal waiting
            wish = await request.json()
            waiting += 1
            if waiting == wish["requests"]:
                ready.set()
            await ready.wait()
            waiting -= 1
            if not waiting:
                ready.clear()
            return web.Response(body=bodies[wish["kind"]], content_type="application/json")

        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        pipe.send((site._server.sockets[0].getsockname()[1], {k: len(b) for k, b in bodies.items()}))
        await asyncio.to_thread(pipe.recv)
        await runner.cleanup()

    asyncio.run(run())


def parse_lists(reply: bytes) -> Generation:
    """By json.loads into lists; arrays only for what is judged here."""
    said = json.loads(reply)
    meta = said["meta_info"]
    pairs = meta["output_token_logprobs"]
    tokens = [entry[1] for entry in pairs]
    assert tokens == said["output_ids"]
    logprobs = [math.nan if entry[0] is None else entry[0] for entry in pairs]
    spans = [VersionSpan(int(meta["weight_version"]), 0, len(tokens))]
    return Generation(np.array(tokens, np.int32), np.array(logprobs, np.float32), "length", spans)


def parse_columns(reply: bytes) -> Generation:
    return parse_generation([decode(reply)])


PARSE = {"columns": parse_columns, "lists": parse_lists}


@dataclass
class Beats:
    """How late each was, and the loop's CPU seconds since the one before."""

    late: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    async def beat(self) -> None:
        """Until it is cancelled."""
        while True:
            due, before = time.perf_counter() + BEAT_SECONDS, time.thread_time()
            await asyncio.sleep(BEAT_SECONDS)
            self.late.append(time.perf_counter() - due)
            self.busy.append(time.thread_time() - before)


async def one_round(http: HttpClient, kind: str, payloads: list[dict]) -> tuple[Beats, float, int]:
    """(the heartbeats, CPU seconds of this process, tokens)."""
    beats, count = Beats(), 0

    async def one(payload: dict) -> None:
        nonlocal count
        generation = PARSE[kind](await http.post_for_bytes("/generate", payload, 600))
        partial = extended(Partial(), generation)
        if why := objection(partial, generation.finish_reason, None):
            raise SystemExit(f"a response was refused: {why}")
        count += len(generation.tokens)

    heart, begun = asyncio.create_task(beats.beat()), time.process_time()
    await asyncio.gather(*map(one, payloads))
    heart.cancel()
    return beats, time.process_time() - begun, count


def row(kind: str, size: float, beats: Beats, cpu: float, tokens: int) -> dict:
    return {
        "kind": kind,
        "reply_bytes_per_token": size,
        "heartbeat_p99_ms": float(np.percentile(beats.late, 99)) * 1e3,
        "heartbeat_max_ms": max(beats.late) * 1e3,
        "busy_p99_ms": float(np.percentile(beats.busy, 99)) * 1e3,
        "busy_max_ms": max(beats.busy) * 1e3,
        "worker_cpu_seconds_per_million_tokens": cpu / tokens * 1e6,
    }


async def emulated(port: int, sizes: dict[str, int], requests: int, tokens: int) -> list[dict]:
    process = SimpleNamespace(name="the emulated engine", port=port, key="none", dead=asyncio.Event())
    http, rows = HttpClient(process), []
    http.open()
    try:
        for kind, count in (("columns", requests), ("lists", -(-requests // LISTS_SHARE))):
            told = await one_round(http, kind, [{"kind": kind, "requests": count}] * count)
            rows.append(row(kind, sizes[kind] / tokens, *told) | {"requests": count, "tokens": tokens})
    finally:
        await http.close()
    return rows


def measure(requests: int, tokens: int) -> list[dict]:
    """The rows of the emulated engine."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(tokens, there))
    server.start()
    try:
        if not here.poll(60):
            raise SystemExit("the emulated engine was not up within 60 s")
        port, sizes = here.recv()
        return event_loop.run(emulated(port, sizes, requests, tokens))
    finally:
        here.send("end")
        server.join(20)


async def real(folder: Path) -> list[dict]:
    """By SGLang itself, on two cores and a tiny model."""
    from laminar_hpc.config.load import load_config
    from laminar_hpc.engine.interface import sampling_parameters
    from laminar_hpc.engine.sglang.server import SglangServer

    words = [f"rollout.max_concurrent={REAL_REQUESTS}", "rollout.kv_cache_tokens=65536"]
    config = load_config(["experiment=demo", "rollout.engine_start_seconds=600", *words])
    engine, rows = SglangServer(config, 0, folder), list[dict]()
    sampling = sampling_parameters(config.sampling, 1.0, REAL_TOKENS, []) | {"ignore_eos": True}
    common = {"sampling_params": sampling, "return_logprob": True, "extra_key": "0"}
    payload = {"columns": common, "lists": common | {"logprob_start_len": 0}}
    await engine.start(Path(config.model.path), 0, 0)
    try:
        server = psutil.Process(engine.process.pid)
        for number in range(-1, REAL_ROUNDS):  # the first is not counted
            for kind in ("columns", "lists"):
                asked = [payload[kind] | {"input_ids": [1 + i % 7, 2 + i % 5]} for i in range(REAL_REQUESTS)]
                reply = await engine.http.post_for_bytes("/generate", asked[0], 600)
                before = sum(server.cpu_times()[:2])
                told = await one_round(engine.http, kind, asked)
                spent = sum(server.cpu_times()[:2]) - before
                if number >= 0:
                    more = {"server_cpu_seconds_per_million_tokens": spent / told[2] * 1e6}
                    more |= {"requests": REAL_REQUESTS, "tokens": REAL_TOKENS}
                    rows.append(row(kind, len(reply) / REAL_TOKENS, *told) | more)
    finally:
        await engine.stop()
    return rows


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--requests", type=int, default=1024)
    options.add_argument("--tokens", type=int, default=32_768)
    options.add_argument("--real", action="store_true", help="SGLang instead of the emulated engine")
    chosen = options.parse_args()
    if chosen.real:
        with tempfile.TemporaryDirectory(prefix="laminar-replies-") as folder:
            rows = event_loop.run(real(Path(folder)))
    else:
        rows = measure(chosen.requests, chosen.tokens)
    figures = {
        f"{name}_{kind}": common.median([row[name] for row in rows if row["kind"] == kind])
        for name in ("heartbeat_p99_ms", "busy_p99_ms", "worker_cpu_seconds_per_million_tokens")
        for kind in PARSE
    }
    common.finish(chosen, figures, rows, [name for name in COLUMNS if name in rows[0]])


if __name__ == "__main__":
    main()
