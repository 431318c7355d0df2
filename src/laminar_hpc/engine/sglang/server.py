"""SGLang as an engine (engine/interface.py): every endpoint and field name of its server that this system
uses stands here; http_client.py speaks HTTP, port_client.py speaks with our plugin inside the server.

The server is a child process on a loopback port. A dead server raises EngineDied.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import (
    PROFILED_PASSES,
    EngineDied,
    Generation,
    OnTokens,
    Prompt,
    RequestFailed,
    SamplingParameters,
    Sums,
    TensorLayout,
    Utilization,
)
from laminar_hpc.engine.sglang import speculation
from laminar_hpc.engine.sglang.adapter_calls import AdapterCalls
from laminar_hpc.engine.sglang.command_line import arguments, has_cuda
from laminar_hpc.engine.sglang.http_client import HttpClient
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.port_client import PortClient
from laminar_hpc.engine.sglang.process import EngineProcess
from laminar_hpc.engine.sglang.replies import GenerateReply, columns, decode, logprob, parse_generation
from laminar_hpc.engine.sglang.shards import whole_sums, whole_tensors
from laminar_hpc.machine.own_time import own_time

CONTROL_SECONDS = 120.0  # maximum wait for a control request
# Weights come from shared memory at some GB per second. The first load from a slot registers its pages with
# CUDA, for every tensor-parallel rank beside the others.
LOAD_BYTES_PER_SECOND = 0.5e9
UTILIZATION_SECONDS = 2.0  # a look at the utilization is worth no longer wait
CURVE_STEPS = 16  # decode steps of one point of the decode curve
# the scheduler needs a turn of its loop, some milliseconds, to put a finished request away
FLUSH_SECONDS = 10.0
UNVERIFIED = "unverified"  # weight version of an engine whose weights have no id yet


def load_seconds(size: int) -> float:
    """The maximum wait for the load of a slot with `size` bytes."""
    return CONTROL_SECONDS + size / LOAD_BYTES_PER_SECOND


class SglangServer(AdapterCalls):
    """One life of one SGLang server. Each method does what Engine says of it."""

    Process = EngineProcess

    def __init__(self, config: RunConfig, index: int, run_dir: Path) -> None:
        self.name = f"engine {index}"
        self.log = run_dir / "logs" / f"engine{index}.log"
        ranks = config.rollout.tensor_parallel
        options = config.rollout.threads, ranks, config.model.deterministic
        self.process = self.Process(self.name, self.log, *options)
        self.http = HttpClient(self.process)
        super().__init__(config, PortClient(self.process, ranks))
        self.adapters = [] if config.model.lora.rank else None
        # what each tensor-parallel rank holds; as long as the engine lives
        self._shards: list[list[protocol.TensorShard]] | None = None

    # ---- life ----------------------------------------------------------------------------------------------

    async def start(self, directory: Path, weight_id: int | None, seed: int) -> float:
        """See Engine. The limit is rollout.engine_start_seconds."""
        t0, limit = own_time(), self.config.rollout.engine_start_seconds
        weight_version = UNVERIFIED if weight_id is None else str(weight_id)
        self.process.start(arguments(self.config, directory, weight_version, seed))
        self.http.open()
        while await self.http.get("/model_info", seconds=5.0) is None:
            if self.process.dead.is_set():
                raise self.process.death()
            if own_time() - t0 > limit:
                line = self.process.last_log_line()
                raise LaminarError(
                    f"{self.name} did not answer within "
                    f"rollout.engine_start_seconds={limit:g}: {line} (log: {self.log})"
                )
            self.process.note_shared_memory(every=1.0)
            await asyncio.sleep(0.05)
        self.process.watch_members()
        await self.ping()
        self.process.note_shared_memory()
        # objects made at the start are never collected: shorter pauses later
        await self.http.post("/freeze_gc", {}, CONTROL_SECONDS)
        return own_time() - t0

    async def stop(self) -> None:
        await self.http.close()
        self.port.close()
        await self.process.stop()

    async def died(self) -> EngineDied:
        await self.process.dead.wait()
        return self.process.death()

    # ---- requests ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_tokens: Prompt,
        sampling: SamplingParameters,
        request_id: str,
        namespace: str,
        on_tokens: OnTokens | None = None,
        routes_from: int | None = None,
    ) -> Generation:
        """See Engine. The limit is rollout.request_timeout_seconds."""
        payload: dict[str, Any] = {
            "rid": request_id,
            "input_ids": prompt_tokens,
            "sampling_params": speculation.by_name(sampling),
            "return_logprob": True,
            **self.naming(namespace),
        }
        if routes_from is not None:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
        seconds = self.config.rollout.request_timeout_seconds
        if on_tokens is None:
            return parse_generation([decode(await self.http.post_for_bytes("/generate", payload, seconds))])
        return parse_generation(await self._stream(payload, on_tokens, seconds))

    async def _stream(
        self, payload: dict[str, Any], on_tokens: OnTokens, seconds: float
    ) -> list[GenerateReply]:
        """The events of one request, each of which holds what is new."""
        interval = self.config.rollout.increment_tokens
        sampling = {**payload["sampling_params"], "stream_interval": interval}
        replies: list[GenerateReply] = []
        events = self.http.events(
            "/generate", {**payload, "stream": True, "sampling_params": sampling}, seconds
        )
        async with contextlib.aclosing(events):
            async for event in events:
                replies.append(decode(event))
                if replies[-1].meta_info.finish_reason is None:
                    on_tokens(*columns(replies[-1].meta_info))
        if not replies or replies[-1].meta_info.finish_reason is None:
            await self.http.raise_if_dead()
            raise RequestFailed(f"{self.name} broke off its answer after {len(replies)} increments")
        return replies

    async def abort(self, request_id: str | None = None) -> None:
        payload = {"rid": request_id or "", "abort_all": request_id is None}
        await self.http.post("/abort_request", payload, CONTROL_SECONDS)

    async def score(self, sequences: list[list[int]], namespace: str) -> list[list[float]]:
        payload = {
            "input_ids": sequences,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            **{key: [name] * len(sequences) for key, name in self.naming(namespace).items()},
        }
        replies = await self.http.post("/generate", payload, CONTROL_SECONDS)
        return [
            [logprob(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:]]
            for reply in replies
        ]

    async def decode_curve(self, max_requests: int, context: int) -> list[tuple[int, float]]:
        """See Engine. It is measured at the time of the call."""
        curve, requests = [], 1
        drawer = {"lora_id": str(self.adapters[-1])} if self.adapters else {"extra_key": "curve"}
        sampling = {"temperature": 1.0, "max_new_tokens": CURVE_STEPS, "ignore_eos": True}
        while True:
            payload = {
                "input_ids": [[1 + i % 7] * context for i in range(requests)],
                **{key: [name] * requests for key, name in drawer.items()},
            }
            prefill = {**payload, "sampling_params": {**sampling, "max_new_tokens": 1}}
            await self.http.post("/generate", prefill, CONTROL_SECONDS)
            t0 = time.monotonic()  # the prefix is cached by now: what is left is decoding
            await self.http.post("/generate", {**payload, "sampling_params": sampling}, CONTROL_SECONDS)
            curve.append((requests, (time.monotonic() - t0) / CURVE_STEPS))
            if requests >= max_requests:
                return curve
            requests = min(2 * requests, max_requests)

    async def profile(self, folder: Path) -> None:
        """See Engine. Each tensor-parallel rank writes engineN-*TP-RANK*.trace.json.gz."""
        folder.mkdir(parents=True, exist_ok=True)
        payload = {
            "output_dir": str(folder),
            "num_steps": PROFILED_PASSES,
            "activities": ["CPU", "GPU"] if has_cuda() else ["CPU"],
            "with_stack": False,
            "record_shapes": False,
            "profile_prefix": self.log.stem,
        }
        await self.http.post("/start_profile", payload, CONTROL_SECONDS)

    async def utilization(self) -> Utilization | None:
        """See Engine. The scheduler leaves these figures in shared memory: it is not asked."""
        reply = await self.http.get("/v1/loads?include=core", UTILIZATION_SECONDS)
        try:
            core = reply["loads"][0]
            keys = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
            return Utilization(*(core[key] for key in keys))
        except (LookupError, TypeError):
            return None  # it is starting, dying or busy

    # ---- weights -------------------------------------------------------------------------------------------

    async def layout(self) -> list[TensorLayout]:
        """See Engine. Raises LaminarError when the tensor-parallel ranks disagree."""
        return whole_tensors(await self._layouts())

    async def sums(self) -> Sums:
        """See Engine. Raises LaminarError when copies of a shard differ."""
        return await self._whole_sums(protocol.GetSums())

    async def load_weights(self, directory: Path, weight_id: int, paused: bool = False) -> Sums:
        """See Engine. The prefix cache is emptied; a paused engine's requests keep their KV, and others reuse
        none of it, as their namespace is another."""
        await self._layouts()
        if not paused:
            await self.flush()  # the scheduler may not yet have put away the last request that it answered
        file = directory / WEIGHTS_FILE
        seconds = load_seconds(file.stat().st_size if file.exists() else 0)  # the engine refuses what is gone
        sums = await self._whole_sums(protocol.LoadWeights(str(directory), paused), seconds)
        self.process.note_shared_memory()
        payload = {"new_version": str(weight_id), "abort_all_requests": False}
        await self.http.post("/update_weight_version", payload, CONTROL_SECONDS)
        return sums

    async def flush(self) -> None:
        """Empties the prefix cache once the scheduler is idle. Raises RequestFailed after FLUSH_SECONDS."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                await self.http.post("/flush_cache", {}, CONTROL_SECONDS)
                return
            except RequestFailed:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.005)

    async def pause(self) -> None:
        """See Engine. A paused server answers control requests only."""
        await self.http.post("/pause_generation", {"mode": "in_place"}, CONTROL_SECONDS)

    async def resume(self) -> None:
        await self.http.post("/continue_generation", {}, CONTROL_SECONDS)

    async def _layouts(self) -> list[list[protocol.TensorShard]]:
        if self._shards is None:
            replies = await self.port.call(protocol.GetLayout(), protocol.LiveLayout, CONTROL_SECONDS)
            self._shards = [reply.tensors for reply in replies]
        return self._shards

    async def _whole_sums(
        self, request: protocol.GetSums | protocol.LoadWeights, seconds: float = CONTROL_SECONDS
    ) -> Sums:
        shards = await self._layouts()
        replies = await self.port.call(request, protocol.LiveSums, seconds)
        return whole_sums(shards, [reply.sums for reply in replies])

    async def ping(self, seconds: float = CONTROL_SECONDS) -> None:
        """Asks each scheduler's own loop for a sign of life."""
        await self.port.call(protocol.PortPing(), protocol.Alive, seconds)
