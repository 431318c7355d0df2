"""The one adapter of SGLang: every endpoint, argument and field name of its server that this system knows
stands here.

A rollout worker owns one `SglangServer`: it starts the server as a child on a loopback port, generates,
scores, loads weights, and asks the engine port for sums of the live weights. Its methods run in the worker's
event loop. Every wait is bounded; a dead server raises EngineDied.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import aiohttp

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig, SamplingConfig
from laminar_hpc.messages import VersionSpan
from laminar_hpc.rollout.engine_process import EngineDied, EngineProcess, has_cuda
from laminar_hpc.rollout.kv_engine import KvEngine
from laminar_hpc.rollout.port_client import PortClient
from laminar_hpc.rollout.sglang_plugin import protocol
from laminar_hpc.rollout.shards import Sums, whole_sums, whole_tensors

SGLANG_VERSION = tuple(int(part) for part in version("sglang").split(".")[:3] if part.isdigit())
# meta_info.weight_versions; older ones report the version at the end only
REPORTS_SPANS = SGLANG_VERSION >= (0, 5, 20)
# longest wait for a control request; a load from shared memory moves some GB per second
CONTROL_SECONDS = 120.0
LOAD_SECONDS = 2.0  # a look at the load is worth no longer wait
CURVE_STEPS = 16  # decode steps of one point of the decode curve
# the scheduler needs a turn of its loop, some milliseconds, to put a finished request away
FLUSH_SECONDS = 10.0


class RequestFailed(LaminarError):
    """The engine refused or dropped this one request; it goes on with others."""


@dataclass(frozen=True)
class EngineLoad:
    """Requests, and tokens of the KV cache."""

    running: int
    queued: int
    kv_tokens: int
    kv_capacity: int


@dataclass(frozen=True)
class Generation:
    """One response: tokens with the end-of-sequence token, the log-probs of exactly these tokens (NaN where
    the engine gives none that is finite), and which weights drew them."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # stop | length | abort | moved
    spans: list[VersionSpan]  # weight_id -1 where the engine named a version that is no weight id
    cached_tokens: int = 0  # of the prompt, whose KV was there and was not computed


def sampling_parameters(
    sampling: SamplingConfig, temperature: float, max_tokens: int, stop_token_ids: list[int]
) -> dict:
    """SGLang's sampling_params. Log-probs that it returns are of the distribution at this temperature, before
    top-k, top-p and min-p."""
    return {
        "temperature": temperature,
        "max_new_tokens": max_tokens,
        "stop_token_ids": stop_token_ids,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }


def _logprob(value: float | None) -> float:
    """JSON has no NaN and no infinities: SGLang writes null for each. They are NaN here, and whoever uses
    them decides."""
    return math.nan if value is None else value


def _weight_id(version_name: object) -> int:
    return int(version_name) if str(version_name).isdigit() else -1


def parse_generation(reply: dict) -> Generation:
    """Raises RequestFailed when tokens and log-probs of the reply do not belong together."""
    meta = reply["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    tokens = [entry[1] for entry in pairs]
    if tokens != list(reply["output_ids"]):
        raise RequestFailed(
            f"the engine returned {len(reply['output_ids'])} "
            f"tokens with {len(pairs)} log-probs of other tokens"
        )
    spans = meta.get("weight_versions") if REPORTS_SPANS else None
    if not spans:
        spans = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    return Generation(
        tokens,
        [_logprob(entry[0]) for entry in pairs],
        meta["finish_reason"]["type"],
        [VersionSpan(_weight_id(span["version"]), span["start"], span["end"]) for span in spans],
        int(meta.get("cached_tokens") or 0),
    )


class SglangServer(KvEngine):
    """One life of one engine: `start`, use, `stop`; a second start needs a new object."""

    def __init__(self, config: RunConfig, index: int, run_dir: Path) -> None:
        self.config = config
        self.name = f"engine {index}"
        self.log = run_dir / "logs" / f"engine{index}.log"
        self.process = EngineProcess(
            self.name, self.log, config.rollout.threads, config.rollout.tensor_parallel
        )
        self._http: aiohttp.ClientSession | None = None
        self._port: PortClient | None = None
        # what each tensor-parallel rank holds; as long as the engine lives
        self._shards: list[list[protocol.TensorLayout]] | None = None

    # ---- life ----------------------------------------------------------------------------------------------

    def arguments(self, directory: Path, weight_version: str, seed: int) -> list[str]:
        """SGLang's command line, without host, port and key."""
        rollout = self.config.rollout
        values = {
            "model-path": str(directory),
            "weight-version": weight_version,
            "dtype": self.config.model.dtype,
            "random-seed": str(seed),
            "tensor-parallel-size": str(rollout.tensor_parallel),
            "max-total-tokens": str(rollout.kv_cache_tokens),
            "max-running-requests": str(rollout.max_concurrent),
            "log-level-http": "warning",  # one line per request would be most of the log
            "skip-tokenizer-init": "true",
            # it sleeps a second first; the probe of the first verification warms up as well
            "skip-server-warmup": "true",
            "sleep-on-idle": "true",
        }
        if self.config.model.float32_head and self.config.model.dtype != "float32":
            values["enable-fp32-lm-head"] = "true"
        if rollout.increment_tokens:
            values["incremental-streaming-output"] = "true"
        if not has_cuda():
            # A whole batch of short prompts is prefilled at once; the KV cache is bounded by
            # max-total-tokens, not by a share of memory.
            values |= {
                "device": "cpu",
                "chunked-prefill-size": "16384",
                "max-prefill-tokens": "16384",
                "mem-fraction-static": "0.8",
            }
            # nothing overlaps on the same cores: it costs a wasted row per response
            values["disable-overlap-schedule"] = "true"
        values |= {key.replace("_", "-"): value for key, value in rollout.engine_arguments.items()}
        flat = [
            (f"--{key}",) if value == "true" else (f"--{key}", value)
            for key, value in values.items()
            if value != "false"
        ]
        return [word for pair in flat for word in pair]

    async def start(self, directory: Path, weight_version: str, seed: int) -> float:
        """Starts the server on the weights in `directory`; returns the seconds until it answered. Raises
        EngineDied or LaminarError."""
        t0, limit = time.monotonic(), self.config.rollout.engine_start_seconds
        self.process.start(self.arguments(directory, weight_version, seed))
        self._http = aiohttp.ClientSession(
            f"http://127.0.0.1:{self.process.port}",
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {self.process.key}"},
        )
        self._port = PortClient(self.process.socket_path, self.config.rollout.tensor_parallel)
        while not await self._answers():
            if self.process.dead.is_set():
                raise self.process.death()
            if time.monotonic() - t0 > limit:
                words = self.process.last_words()
                raise LaminarError(
                    f"{self.name} did not answer within "
                    f"rollout.engine_start_seconds={limit:g}: {words} (log: {self.log})"
                )
            self.process.note_shared_memory(every=1.0)
            await asyncio.sleep(0.05)
        self.process.watch_members()
        await self.ping()
        self.process.note_shared_memory()
        # objects made at the start are never collected: shorter pauses later
        await self._post("/freeze_gc", {}, CONTROL_SECONDS)
        return time.monotonic() - t0

    async def _answers(self) -> bool:
        assert self._http is not None
        try:
            async with self._http.get("/model_info", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.close()
        if self._port is not None:
            self._port.close()
        await self.process.stop()

    # ---- requests ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: dict,
        request_id: str,
        namespace: str,
        on_tokens: Callable | None = None,
    ) -> Generation:
        """One response. `namespace` keeps cached KV of other weights apart; `on_tokens(tokens, logprobs)` is
        told of it on the way, every rollout.increment_tokens tokens, but for the rest at its end. Raises
        RequestFailed, EngineDied."""
        payload = {
            "rid": request_id,
            "input_ids": prompt_tokens,
            "sampling_params": sampling,
            "return_logprob": True,
            "extra_key": namespace,
        }
        if on_tokens is not None:
            return parse_generation(await self._stream(payload, on_tokens))
        return parse_generation(
            await self._post("/generate", payload, self.config.rollout.request_timeout_seconds)
        )

    async def _stream(self, payload: dict, on_tokens: Callable[[list[int], list[float]], None]) -> dict:
        """The same reply as without a stream, put together from the server's events, each of which holds what
        is new."""
        assert self._http is not None
        seconds = self.config.rollout.request_timeout_seconds
        sampling = {**payload["sampling_params"], "stream_interval": self.config.rollout.increment_tokens}
        tokens: list[int] = []
        pairs: list = []
        reply: dict = {}
        try:
            async with self._http.post(
                "/generate",
                json={**payload, "stream": True, "sampling_params": sampling},
                timeout=aiohttp.ClientTimeout(total=seconds),
                read_bufsize=1 << 24,
            ) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    reply = json.loads(line[6:])
                    if "meta_info" not in reply:
                        raise RequestFailed(f"{self.name} refused the request: {str(reply)[:300]}")
                    found = reply["meta_info"].get("output_token_logprobs") or []
                    tokens += reply["output_ids"]
                    pairs += found
                    if reply["meta_info"]["finish_reason"] is None:
                        on_tokens([entry[1] for entry in found], [_logprob(entry[0]) for entry in found])
        except TimeoutError:
            raise RequestFailed(f"{self.name} did not end its answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            await self._raise_if_dead()
            raise RequestFailed(
                f"{self.name} broke off its answer: {type(error).__name__}: {error}"
            ) from None
        if not reply or reply["meta_info"]["finish_reason"] is None:
            await self._raise_if_dead()
            raise RequestFailed(f"{self.name} broke off its answer after {len(tokens)} tokens")
        reply["output_ids"], reply["meta_info"]["output_token_logprobs"] = tokens, pairs
        return reply

    async def score(self, sequences: list[list[int]], namespace: str) -> list[list[float]]:
        """Log-probs of tokens 1.. of each sequence given the prefix, at temperature 1; NaN for one that is
        not finite."""
        payload = {
            "input_ids": sequences,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": [namespace] * len(sequences),
        }
        replies = await self._post("/generate", payload, CONTROL_SECONDS)
        return [
            [_logprob(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:]]
            for reply in replies
        ]

    async def decode_curve(self, most: int, context: int) -> list[tuple[int, float]]:
        """(requests, seconds per decode step) for 1, 2, 4 ... `most` requests of `context` tokens, measured
        now on the idle engine."""
        curve, requests = [], 1
        sampling = {"temperature": 1.0, "max_new_tokens": CURVE_STEPS, "ignore_eos": True}
        while True:
            payload = {
                "input_ids": [[1 + i % 7] * context for i in range(requests)],
                "extra_key": ["curve"] * requests,
            }
            await self._post(
                "/generate",
                {**payload, "sampling_params": {**sampling, "max_new_tokens": 1}},
                CONTROL_SECONDS,
            )
            begun = time.monotonic()  # the prefix is cached by now: what is left is decoding
            await self._post("/generate", {**payload, "sampling_params": sampling}, CONTROL_SECONDS)
            curve.append((requests, (time.monotonic() - begun) / CURVE_STEPS))
            if requests >= most:
                return curve
            requests = min(2 * requests, most)

    async def load(self, directory: Path, weight_version: str, paused: bool = False) -> Sums:
        """Loads a slot in place through the engine port and sets the version. Returns the sums of what the
        live parameters then are, as `sums` does. The prefix cache is emptied; but when the engine is `paused`
        its requests keep their KV, and others find none of it, as their namespace is another.

        The caller has drained or paused it. After an error the parameters may be of two ids: end the engine.
        """
        if self._shards is None:
            await self.layout()
        if not paused:
            await self.flush()  # the scheduler may not yet have put away the last request that it answered
        replies = await self._call(protocol.Load(str(directory), paused), CONTROL_SECONDS)
        self.process.note_shared_memory()
        await self._post(
            "/update_weight_version",
            {"new_version": weight_version, "abort_all_requests": False},
            CONTROL_SECONDS,
        )
        return whole_sums(self._shards, [reply.sums for reply in replies])

    async def flush(self) -> None:
        """Empties the prefix cache as soon as the scheduler is idle. Raises RequestFailed when it still is
        not after FLUSH_SECONDS."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                await self._post("/flush_cache", {}, CONTROL_SECONDS)
                return
            except RequestFailed:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.005)

    async def load_info(self) -> EngineLoad | None:
        """How full the engine is, by what its scheduler leaves in shared memory: it is not asked. None when
        there is no answer."""
        if self._http is None or self._http.closed:
            return None
        try:
            async with self._http.get(
                "/v1/loads?include=core", timeout=aiohttp.ClientTimeout(total=LOAD_SECONDS)
            ) as response:
                core = (await response.json())["loads"][0]
                keys = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
                return EngineLoad(*(core[key] for key in keys))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError):
            return None  # it is starting, dying or busy: nobody may suffer from a look at it

    async def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all of them; each ends with finish_reason abort."""
        await self._post(
            "/abort_request", {"rid": request_id or "", "abort_all": request_id is None}, CONTROL_SECONDS
        )

    async def pause(self) -> None:
        """All requests stand still, with their KV, until `resume`; only control requests are answered."""
        await self._post("/pause_generation", {"mode": "in_place"}, CONTROL_SECONDS)

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, CONTROL_SECONDS)

    async def _post(self, path: str, payload: dict, seconds: float) -> dict | list:
        assert self._http is not None
        try:
            async with self._http.post(
                path, json=payload, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                body = await response.read()
                if response.status == 200:
                    return (
                        await response.json(content_type=None)
                        if body[:1] in (b"{", b"[")
                        else {"text": body.decode(errors="replace")}
                    )
        except TimeoutError:
            raise RequestFailed(f"{self.name} did not answer {path} within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            await self._raise_if_dead()
            raise RequestFailed(f"{self.name} broke off {path}: {type(error).__name__}: {error}") from None
        if response.status >= 500:
            await self._raise_if_dead()
        raise RequestFailed(
            f"{self.name} answered {path} with HTTP {response.status}: {body[:300].decode(errors='replace')}"
        )

    async def _raise_if_dead(self) -> None:
        """SGLang ends its processes one after the other: a broken connection is seen up to a second before
        the death."""
        try:
            await asyncio.wait_for(self.process.dead.wait(), 1.0)
        except TimeoutError:
            return
        raise self.process.death()

    # ---- the engine port -----------------------------------------------------------------------------------

    async def _call(self, request: protocol.Request, seconds: float, long: bool = False) -> list:
        """The replies of the tensor-parallel ranks. A `long` one waits beside others, and its refusals are
        replies."""
        assert self._port is not None
        call = asyncio.create_task((self._port.ask if long else self._port.call)(request, seconds))
        death = asyncio.create_task(self.process.dead.wait())
        try:
            await asyncio.wait((call, death), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self.process.death()
            return call.result()
        finally:
            call.cancel()
            death.cancel()

    async def ping(self, seconds: float = CONTROL_SECONDS) -> list[protocol.Alive]:
        """Asks each scheduler's own loop for a sign of life."""
        return await self._call(protocol.Ping(), seconds)

    async def layout(self) -> list[protocol.TensorLayout]:
        """Hugging Face names, shapes and dtypes of the engine's parameters, whole. Raises LaminarError when
        its ranks disagree."""
        self._shards = [reply.tensors for reply in await self._call(protocol.Layout(), CONTROL_SECONDS)]
        return whole_tensors(self._shards)

    async def sums(self) -> Sums:
        """Sums over the live parameters of all ranks, see kernels/sums.py. Raises LaminarError when copies of
        a shard differ."""
        if self._shards is None:
            await self.layout()
        return whole_sums(
            self._shards, [reply.sums for reply in await self._call(protocol.Sums(), CONTROL_SECONDS)]
        )


__all__ = ["EngineDied", "EngineLoad", "Generation", "RequestFailed", "SglangServer", "sampling_parameters"]
