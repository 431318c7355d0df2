"""Continuous batching without a model: requests of invented length take the time that the simulator's
`SimulatedReplica` gives them, at emulation.time_scale."""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import replayed_routes
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import load_tokenizer, stop_token_ids
from laminar_hpc.engine.interface import (
    UNKNOWN_WEIGHTS,
    EngineDied,
    Generation,
    OnTokens,
    Prompt,
    SamplingParameters,
    Utilization,
)
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs
from laminar_hpc.simulator.emulated import responses
from laminar_hpc.simulator.emulated.adapters import Adapters
from laminar_hpc.simulator.replica import INFINITY, SimulatedReplica
from laminar_hpc.simulator.request import EngineAdmission, SimulatedRequest
from laminar_hpc.simulator.tables import GPUS, MODELS

_ALMOST = 1e-7  # steps before its end at which the replica ends a request


@dataclasses.dataclass
class EmulatedRequest:
    """A request in the engine. `first`: response tokens that came with it; `wanted`: those at its end."""

    trajectory_id: int
    first: int
    wanted: int
    cut: bool
    context: int  # tokens of its prompt, and what came with it
    on_tokens: OnTokens | None
    adapter: int | None = None  # weight id; None: of the engine's full weights
    cached: int = 0  # of its prompt, found in the prefix cache
    routes_from: int | None = None
    ends_with: Sequence[int] = ()  # its last tokens, where they are not invented
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (earlier weight id, last token)

    def __post_init__(self) -> None:
        self.told = self.first  # up to here `on_tokens` has had them
        self.future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.request = SimulatedRequest(self.trajectory_id, None, [self.wanted - self.first], self.context, 0)

    def generated(self, replica: SimulatedReplica) -> int:
        """Response tokens by now, those that came with it included."""
        request = self.request
        left = (
            max(0.0, request.end - replica.steps) if request.ticket in replica.running else request.remaining
        )
        return self.wanted - max(0, min(self.wanted - self.first, math.ceil(left - _ALMOST)))


def _call_tokens(config: RunConfig) -> list[int]:
    """emulation.call with the stop token behind it."""
    if not config.emulation.turn_tokens:
        return []
    path = Path(config.model.path)
    encoded = load_tokenizer(str(path)).encode(config.emulation.call, add_special_tokens=False)
    return [*encoded.ids, stop_token_ids(path)[0]]


class EmulatedDecoding:
    """The base of EmulatedEngine that has its clock, its requests and its death."""

    def __init__(self, config: RunConfig, index: int, run_dir: Path) -> None:
        self.config = config
        self.index = index
        self.name = f"emulated engine {index}"
        self.log = run_dir / "logs" / f"rollout{index}.log"
        self._dead = asyncio.Event()
        emulation = config.emulation
        self.scale = emulation.time_scale
        constants = dataclasses.replace(DEFAULT, **emulation.constants)
        self._prompt_correlation = constants.prompt_correlation
        self.model = MODELS[emulation.model]
        tensor_parallel = emulation.tensor_parallel or self.model.tensor_parallel
        self.costs = engine_costs(self.model, GPUS[emulation.gpu], tensor_parallel, constants)
        model = model_config(config.model.path)
        self.vocabulary = model["vocab_size"]
        self._route_shape = replayed_routes(config, model)
        self.weight_id: int | None = None
        self.adapters = Adapters(self.name, config.model.lora.rank > 0)
        admission = EngineAdmission.of(config.sampling.max_response_tokens, constants)
        self._born = time.monotonic()
        rollout = config.rollout
        self._replica = SimulatedReplica(
            index, self.costs, rollout.kv_cache_tokens, rollout.max_concurrent, admission, tensor_parallel
        )
        self._call = _call_tokens(config)
        self._jobs: dict[str, EmulatedRequest] = {}
        self._job_of: dict[int, EmulatedRequest] = {}
        self._paused: float | None = None  # since when
        self._timer: asyncio.TimerHandle | None = None
        # KV that is here without a running request: tokens, by trajectory, or for what came from elsewhere by
        # the hash of the tokens.
        self._warm: dict[int, int] = {}
        self._came: dict[int, int] = {}

    async def died(self) -> EngineDied:
        """See Engine; only `die` ends it."""
        await self._dead.wait()
        return self._death()

    def die(self) -> None:
        """Ends the engine as the death of a process does."""
        self._dead.set()
        self._stop_timer()
        for job in self._jobs.values():
            if not job.future.done():
                job.future.set_exception(self._death())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _death(self) -> EngineDied:
        return EngineDied(f"{self.name} died (it is emulated)")

    async def utilization(self) -> Utilization | None:
        if self._dead.is_set():
            return None
        self._settle()
        replica = self._replica
        return Utilization(
            len(replica.running),
            len(replica.waiting),
            round(replica.kv + replica.parked_kv),
            round(replica.capacity),
        )

    # ---- time ----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return ((self._paused or time.monotonic()) - self._born) * self.scale

    async def _pass(self, seconds: float) -> None:
        """Lets emulated seconds pass. Raises EngineDied when the engine dies meanwhile."""
        with contextlib.suppress(TimeoutError):
            raise await asyncio.wait_for(self.died(), seconds / self.scale)

    def _settle(self) -> None:
        """Brings the engine to now, event by event, so that a late timer changes nothing; then sets the next
        one. A dead one stays as it was."""
        if self._dead.is_set():
            return
        replica, now = self._replica, self._now()
        while (when := replica.next_time()) <= now:
            replica.advance(when, at_event=True)
            for request in replica.pop_finished():
                job = self._job_of[id(request)]
                if job.ends_with:  # its next turn finds its KV in the prefix cache
                    self._warm[job.trajectory_id] = job.context + job.wanted - job.first
                self._end(job, "length" if job.cut else "stop")
            replica.make_room()
            replica.fill()
        replica.advance(now)
        replica.fill()
        when = replica.next_time()
        self._tell()
        self._stop_timer()
        if when < INFINITY:
            every = self.config.rollout.increment_tokens
            limit = every * self.costs.step(1, 0) if every else INFINITY
            self._timer = asyncio.get_running_loop().call_later(
                min(max(when - now, 0.0), limit) / self.scale, self._settle
            )

    def _end(self, job: EmulatedRequest, reason: str) -> None:
        """The pending `generate` returns; the request must be out of the replica."""
        self._job_of.pop(id(job.request), None)
        end = job.generated(self._replica)
        if not job.future.done():
            generation = self._generation(job, job.first, end, reason)
            job.future.set_result(dataclasses.replace(generation, routes=self._routes(job, end)))

    def _routes(self, job: EmulatedRequest, end: int) -> bytes | None:
        if job.routes_from is None or self._route_shape is None:
            return None
        last = job.context + end - job.first - 1
        return responses.routes(self.index, job.routes_from, last, self._route_shape)

    def _generation(self, job: EmulatedRequest, start: int, end: int, reason: str) -> Generation:
        tokens = responses.tokens(job.trajectory_id, start, end, self.vocabulary)
        call_at = job.wanted - len(job.ends_with)
        if job.ends_with and end > call_at:
            own = job.ends_with[max(0, start - call_at) : end - call_at]
            tokens[len(tokens) - len(own) :] = own
        logprobs = responses.logprobs(job.trajectory_id, start, end)
        spans, at = [], start
        served = self._served() if job.adapter is None else job.adapter
        for weight_id, until in [*job.spans, (served, end)]:
            if until > at:
                spans.append(VersionSpan(weight_id, at - start, until - start))
                at = until
        return Generation(tokens, logprobs, reason, spans, job.cached)

    def _tell(self) -> None:
        every = self.config.rollout.increment_tokens
        for job in self._jobs.values() if every else ():
            now = job.generated(self._replica)
            if job.on_tokens is not None and now - job.told >= every and not job.future.done():
                new = self._generation(job, job.told, now, "")
                job.told = now
                job.on_tokens(new.tokens, new.logprobs)

    async def pause(self) -> None:
        self._settle()
        self._paused = time.monotonic()
        self._stop_timer()

    async def resume(self) -> None:
        self._born += time.monotonic() - (self._paused or time.monotonic())
        self._paused = None
        self._settle()

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
        """See Engine. The request id ends with trajectory, attempt and a counter."""
        if self._dead.is_set():
            raise self._death()
        adapter = self.adapters.named(namespace)
        trajectory_id = int(request_id.split("-")[-3])
        max_tokens = self.config.sampling.max_response_tokens
        first = max_tokens - sampling["max_new_tokens"]
        length = self._length(trajectory_id, prompt_tokens[: len(prompt_tokens) - first])
        turn = self._turn_end(first, prompt_tokens) if self._call else length
        wanted = max(first + 1, min(turn, length))
        cut = wanted >= max_tokens
        job = EmulatedRequest(trajectory_id, first, wanted, cut, len(prompt_tokens), on_tokens, adapter)
        job.ends_with = self._call if wanted < length else ()
        job.routes_from = routes_from
        came = self._came.pop(hash(tuple(prompt_tokens)), 0) if self._came else 0
        warm = min(max(came, self._warm.pop(trajectory_id, 0)), len(prompt_tokens))
        job.cached = warm
        if warm:
            job.request.uncached = float(len(prompt_tokens) - warm)
        elif not first:
            job.request.group = SimpleNamespace(group_id=hash((namespace, *prompt_tokens)))
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

    def _length(self, trajectory_id: int, prompt: Prompt) -> int:
        """Of the whole response."""
        e, most = self.config.emulation, self.config.sampling.max_response_tokens
        group = trajectory_id // self.config.algorithm.samples_per_prompt
        whose = np.asarray(prompt, np.int32).tobytes() if self._prompt_correlation else b""
        return responses.response_length(
            trajectory_id,
            group,
            e.median_response_tokens,
            e.sigma,
            most,
            whose,
            self._prompt_correlation,
        )

    def _turn_end(self, first: int, prompt_tokens: Prompt) -> int:
        """The next multiple of emulation.turn_tokens with room for a call, or where a begun call leads."""
        every, call = self.config.emulation.turn_tokens, self._call
        end = (first // every + 1) * every
        written = first - (end - len(call))  # tokens of the call that would be there by now
        begun = 0 < written <= len(prompt_tokens) and list(prompt_tokens[-written:]) == call[:written]
        return end if written <= 0 or begun else end + every

    def _take(self, job: EmulatedRequest) -> None:
        """Takes the request out of the engine, running or waiting."""
        if job.request.ticket in self._replica.running:
            self._replica.stop(job.request)
        else:
            with contextlib.suppress(ValueError):
                self._replica.waiting.remove(job.request)

    async def abort(self, request_id: str | None = None) -> None:
        self._settle()
        for name, job in list(self._jobs.items()):
            if request_id in (None, name) and not job.future.done():
                self._take(job)
                self._warm[job.trajectory_id] = self._context(job)
                self._end(job, "abort")
        self._settle()

    def _served(self) -> int:
        return UNKNOWN_WEIGHTS if self.weight_id is None else self.weight_id

    def _context(self, job: EmulatedRequest) -> int:
        """Tokens with KV: prompt and response so far."""
        running = job.request.ticket in self._replica.running
        return int(job.request.offset + self._replica.steps) if running else int(job.request.context)
