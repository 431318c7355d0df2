"""An engine that only pretends: the methods of `rollout.sglang_server.SglangServer`, with continuous batching
as the simulator models it.

It has no model and no weights: responses are invented (responses.py), sums are those of the slot's own
manifest, nothing is scored. Time is `simulator.replica.Replica` at emulation.time_scale: decode steps,
prefill, KV capacity and preemption cost what LAMINAR's constants say; KV caches that move cross a real socket
(kv_wire.py) and are charged at their size. Many of them fit into one process.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.emulation import kv_wire, responses
from laminar_hpc.emulation.weights import weights_file
from laminar_hpc.kv.errors import KvRefused
from laminar_hpc.messages import VersionSpan
from laminar_hpc.rollout.engine_process import EngineDied
from laminar_hpc.rollout.sglang_plugin.protocol import TensorLayout
from laminar_hpc.rollout.sglang_server import EngineLoad, Generation
from laminar_hpc.simulator.constants import DEFAULT, GPUS, MODELS
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.replica import INFINITY, Replica
from laminar_hpc.simulator.request import Admission, Request
from laminar_hpc.weights.manifest import MANIFEST_FILE, decode_manifest

_ALMOST = 1e-7  # steps before its end at which the replica ends a request
_WIRE_SECONDS = 30.0  # longest time for one frame to cross


class EmulatedProcess:
    """Stands for the engine's process, which only `EmulatedEngine.die` ends."""

    def __init__(self, name: str) -> None:
        self.name, self.dead, self.pid = name, asyncio.Event(), os.getpid()

    def death(self) -> EngineDied:
        return EngineDied(f"{self.name} died (it is emulated)")


@dataclasses.dataclass
class _Group:
    group_id: int


class _Job:
    """A request in the engine. `first`: response tokens that came with it; `wanted`: response tokens at its
    end."""

    def __init__(
        self, trajectory_id: int, first: int, wanted: int, cut: bool, context: int, on_tokens: Callable | None
    ) -> None:
        self.trajectory_id, self.first, self.wanted, self.cut, self.on_tokens = (
            trajectory_id,
            first,
            wanted,
            cut,
            on_tokens,
        )
        self.spans: list[tuple[int, int]] = []  # (weight id, its last token) of earlier weights
        self.told = first  # up to here `on_tokens` has had them
        self.future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.request = Request(trajectory_id, None, [wanted - first], [], context, 0)

    def generated(self, replica: Replica) -> int:
        """Response tokens by now, those that came with it included."""
        request = self.request
        left = (
            max(0.0, request.end - replica.steps) if request.ticket in replica.running else request.remaining
        )
        return self.wanted - max(0, min(self.wanted - self.first, math.ceil(left - _ALMOST)))


class EmulatedEngine:
    """As `SglangServer`, one life of one engine; `seed` and `directory` mean nothing to it."""

    def __init__(self, config: RunConfig, index: int, run_dir: Path) -> None:
        self.config, self.index = config, index
        self.name = f"emulated engine {index}"
        self.log = run_dir / "logs" / f"rollout{index}.log"
        self.process = EmulatedProcess(self.name)
        emulation = config.emulation
        self.scale = emulation.time_scale
        constants = dataclasses.replace(DEFAULT, **emulation.constants)
        self.model = MODELS[emulation.model]
        self.costs = engine_costs(self.model, GPUS[emulation.gpu], self.model.tensor_parallel, constants)
        self.vocabulary = model_config(config.model.path)["vocab_size"]
        self.weight_id = -1
        self._admission = Admission.of(config.sampling.max_response_tokens, constants)
        self._born = time.monotonic()
        self._replica = self._new_replica()
        self._jobs: dict[str, _Job] = {}
        self._job_of: dict[int, _Job] = {}
        self._paused: float | None = None  # since when
        self._timer: asyncio.TimerHandle | None = None
        self._manifest: Path | None = None
        self._endpoint = kv_wire.Endpoint()
        self._link_free = 0.0  # emulated seconds: the network card is one
        self._reserved: dict[str, int] = {}  # move -> tokens
        self._sent: dict[str, tuple[str, int, int]] = {}  # move -> (address, trajectory, tokens sent)
        # KV that is here without a running request: tokens, by trajectory, or for what came from elsewhere by
        # the hash of the tokens.
        self._warm: dict[int, int] = {}
        self._came: dict[int, int] = {}

    def _new_replica(self) -> Replica:
        r = self.config.rollout
        return Replica(
            self.index,
            self.costs,
            r.kv_cache_tokens,
            r.max_concurrent,
            self._admission,
            self.model.tensor_parallel,
        )

    # ---- life ----------------------------------------------------------------------------------------------

    async def start(self, directory: Path, weight_version: str, seed: int) -> float:
        self._open(directory, weight_version)
        return 0.0

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for job in self._jobs.values():
            job.future.cancel()
        await self._endpoint.stop()

    def die(self) -> None:
        """As if its process had ended."""
        self.process.dead.set()
        for job in self._jobs.values():
            if not job.future.done():
                job.future.set_exception(self.process.death())

    def _open(self, directory: Path, weight_version: str) -> None:
        self.weight_id = int(weight_version) if weight_version.isdigit() else -1
        self._manifest = directory / MANIFEST_FILE
        self._warm.clear()
        self._came.clear()

    async def decode_curve(self, most: int, context: int) -> list[tuple[int, float]]:
        """By its costs; nothing has to be measured."""
        points = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
        return [(requests, self.costs.step(requests, requests * context)) for requests in points]

    async def load(
        self, directory: Path, weight_version: str, paused: bool = False
    ) -> dict[str, tuple[int, int]]:
        self._settle()
        await self._pass(self.costs.pull)
        for job in self._jobs.values():  # paused ones
            job.spans.append((self.weight_id, job.generated(self._replica)))
        self._open(directory, weight_version)
        self._replica.prompts.clear()
        return await self.sums()

    async def layout(self) -> list[TensorLayout]:
        """The tensors of model.path's safetensors file, in the serving dtype."""
        shapes, _ = weights_file(Path(self.config.model.path))
        return [TensorLayout(name, shape, self.config.model.dtype, 0, 0, shape[0]) for name, shape in shapes]

    async def sums(self) -> dict[str, tuple[int, int]]:
        """Those of the manifest that it was given: it holds no weights to add up."""
        assert self._manifest is not None
        return {
            t.name: (t.sum_words, t.sum_indexed) for t in decode_manifest(self._manifest.read_bytes()).tensors
        }

    async def score(self, sequences: list[list[int]], namespace: str) -> list[list[float]]:
        """Nothing: it has no model."""
        return []

    async def load_info(self) -> EngineLoad | None:
        self._settle()
        replica = self._replica
        return EngineLoad(
            len(replica.running),
            len(replica.waiting),
            round(replica.kv + replica.parked_kv),
            round(replica.capacity),
        )

    # ---- time ----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return ((self._paused or time.monotonic()) - self._born) * self.scale

    async def _pass(self, seconds: float) -> None:
        """Emulated seconds. Raises EngineDied when the engine dies meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.dead.wait(), seconds / self.scale)
            raise self.process.death()

    def _settle(self) -> None:
        """Brings the engine to now, event by event, so that a late timer changes nothing; then sets the next
        one."""
        replica, now = self._replica, self._now()
        while (when := replica.next_time()) <= now:
            replica.advance(when, at_event=True)
            for request in replica.pop_finished():
                job = self._job_of[id(request)]
                self._end(job, "length" if job.cut else "stop")
            replica.make_room()
            replica.fill()
        replica.advance(now)
        replica.fill()
        when = replica.next_time()
        self._tell()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when < INFINITY:
            every = self.config.rollout.increment_tokens
            limit = every * self.costs.step(1, 0) if every else INFINITY
            self._timer = asyncio.get_running_loop().call_later(
                min(max(when - now, 0.0), limit) / self.scale, self._settle
            )

    def _end(self, job: _Job, reason: str) -> None:
        """The pending `generate` returns; the request must be out of the replica."""
        self._job_of.pop(id(job.request), None)
        end = job.generated(self._replica)
        if not job.future.done():
            job.future.set_result(self._generation(job, job.first, end, reason))

    def _generation(self, job: _Job, start: int, end: int, reason: str) -> Generation:
        found = responses.tokens(job.trajectory_id, start, end, self.vocabulary)
        logprobs = responses.logprobs(job.trajectory_id, start, end)
        spans, at = [], start
        for weight_id, until in [*job.spans, (self.weight_id, end)]:
            if until > at:
                spans.append(VersionSpan(weight_id, at - start, until - start))
                at = until
        return Generation(found, logprobs, reason, spans)

    async def pause(self) -> None:
        """Requests stand still with their KV."""
        self._settle()
        self._paused = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()

    async def resume(self) -> None:
        self._born += time.monotonic() - (self._paused or time.monotonic())
        self._paused = None
        self._settle()

    def _tell(self) -> None:
        every = self.config.rollout.increment_tokens
        for job in self._jobs.values() if every else ():
            now = job.generated(self._replica)
            if job.on_tokens is not None and now - job.told >= every and not job.future.done():
                part = self._generation(job, job.told, now, "")
                job.told = now
                job.on_tokens(part.tokens, part.logprobs)

    # ---- requests ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_tokens: list[int],
        sampling: dict,
        request_id: str,
        namespace: str,
        on_tokens: Callable | None = None,
    ) -> Generation:
        """As `SglangServer.generate`. The request id ends with trajectory, attempt and batch."""
        if self.process.dead.is_set():
            raise self.process.death()
        trajectory_id = int(request_id.split("-")[-3])
        config, most = self.config, self.config.sampling.max_response_tokens
        group = trajectory_id // config.algorithm.samples_per_prompt
        length = responses.response_length(
            trajectory_id, group, config.emulation.median_response_tokens, config.emulation.sigma, most
        )
        first = most - sampling["max_new_tokens"]
        wanted = max(first + 1, length)
        job = _Job(trajectory_id, first, wanted, length >= most, len(prompt_tokens), on_tokens)
        came = self._came.pop(hash(tuple(prompt_tokens)), 0) if self._came else 0
        warm = min(came or self._warm.pop(trajectory_id, 0), len(prompt_tokens))
        if warm:
            job.request.uncached = float(len(prompt_tokens) - warm)
        elif not first:
            job.request.group = _Group(hash(tuple(prompt_tokens)))
        self._settle()
        self._jobs[request_id] = self._job_of[id(job.request)] = job
        self._replica.waiting.append(job.request)
        self._settle()
        try:
            return await job.future
        finally:
            if job.future.cancelled():
                self._take(job)
            self._jobs.pop(request_id, None)
            self._job_of.pop(id(job.request), None)

    def _take(self, job: _Job) -> None:
        """The request out of the engine, running or waiting."""
        if job.request.ticket in self._replica.running:
            self._replica.stop(job.request)
        else:
            with contextlib.suppress(ValueError):
                self._replica.waiting.remove(job.request)

    async def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all of them; each ends with finish_reason abort."""
        self._settle()
        for job in (
            [self._jobs[request_id]]
            if request_id in self._jobs
            else list(self._jobs.values())
            if request_id is None
            else []
        ):
            if not job.future.done():
                self._take(job)
                self._warm[job.trajectory_id] = self._context(job)
                self._end(job, "abort")
        self._settle()

    # ---- moves ---------------------------------------------------------------------------------------------

    async def kv_reserve(self, move_id: str, weight_id: int, tokens: int) -> str:
        self._settle()
        if weight_id != self.weight_id:
            raise KvRefused(
                f"KV move {move_id} refused: it is of weight id "
                f"{weight_id}, {self.name} serves {self.weight_id}"
            )
        if self._replica.kv + sum(self._reserved.values()) + tokens > self._replica.capacity:
            raise KvRefused(f"KV move {move_id} refused: {self.name} has no room for {tokens} tokens")
        self._reserved[move_id] = tokens
        return await self._endpoint.open(move_id)

    async def kv_send(self, move_id: str, request_id: str, address: str) -> None:
        job = self._job(move_id, request_id)
        self._sent[move_id] = (address, job.trajectory_id, 0)
        await self._ship(move_id, self._context(job))

    async def kv_detach(self, move_id: str, request_id: str) -> int:
        job = self._job(move_id, request_id)
        if move_id not in self._sent:
            raise KvRefused(f"KV move {move_id} refused: nothing was sent before")
        self._take(job)
        context = self._context(job)
        self._warm[job.trajectory_id] = context
        self._end(job, "moved")
        self._settle()
        await self._ship(move_id, context)
        return context

    def _job(self, move_id: str, request_id: str) -> _Job:
        self._settle()
        job = self._jobs.get(request_id)
        if job is None or job.future.done():
            raise KvRefused(f"KV move {move_id} refused: {request_id} is not running")
        return job

    def _context(self, job: _Job) -> int:
        """Tokens with KV: prompt and response so far."""
        running = job.request.ticket in self._replica.running
        return int(job.request.offset + self._replica.steps) if running else int(job.request.context)

    async def _ship(self, move_id: str, context: int) -> None:
        """Tokens that have not gone yet: their bytes cross the socket, their time passes on this engine's
        network card."""
        address, trajectory_id, first = self._sent[move_id]
        count = context - first
        if count <= 0:
            return
        begin = max(self._now(), self._link_free)
        self._link_free = begin + count * self.costs.move_token
        body = int(count * self.model.kv_bytes * self.config.emulation.wire_share)
        await kv_wire.send(address, move_id, first, count, body, _WIRE_SECONDS)
        await self._pass(max(0.0, self._link_free - self._now()))
        self._sent[move_id] = (address, trajectory_id, context)

    async def kv_import(self, move_id: str, tokens: list[int]) -> int:
        offer = self._endpoint.offer(move_id)
        if offer is None or move_id not in self._reserved:
            raise KvRefused(f"KV move {move_id} refused: it was not reserved at {self.name}")
        await self._pass(self.costs.move_latency)
        if offer.tokens > len(tokens) + 1:
            raise KvRefused(f"KV move {move_id} refused: KV of {offer.tokens} tokens came for {len(tokens)}")
        prefix = min(offer.tokens, len(tokens))
        self._came[hash(tuple(tokens))] = prefix
        return prefix

    async def kv_commit(self, move_id: str) -> None:
        if move_id in self._sent:
            self._warm.pop(self._sent[move_id][1], None)
        self._let_go(move_id)

    async def kv_abort(self, move_id: str) -> None:
        self._let_go(move_id)

    def _let_go(self, move_id: str) -> None:
        self._reserved.pop(move_id, None)
        self._sent.pop(move_id, None)
        self._endpoint.close(move_id)
