"""How busy a replica is, told to the controller with its pings: the engine's utilization, and the tokens per
second of late."""

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable

from laminar_hpc.engine.interface import EngineHangs, Utilization
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.line.messages.membership import Ping
from laminar_hpc.machine.own_time import own_time
from laminar_hpc.policies.sizing import saturation_requests
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.engine_watch import EngineWatch

logger = logging.getLogger(__name__)
REPORT_SECONDS = 1.0
# requests, and tokens of each, up to which the decode curve is measured
CURVE_MAX_REQUESTS, CURVE_CONTEXT = 256, 64
RATE_SECONDS = 30.0  # over which tokens per second are counted


class UtilizationReporter:
    """`scoring` gives the number of trajectories whose reward is awaited. Also watches the engine's progress
    with `batch`, which fails with EngineHangs when there is none."""

    def __init__(self, batch: LocalBatch, scoring: Callable[[], int]) -> None:
        self.context = batch.context
        self.state = batch.state
        self.engines = batch.engines
        self.scoring = scoring
        self.batch = batch
        self._watch = EngineWatch()
        self._watched = batch.engines.current
        self._curve: list[tuple[int, float]] = []  # of decode steps
        self._finished: deque[tuple[float, int]] = deque()  # (when, response tokens)

    def finished(self, tokens: int) -> None:
        """A trajectory of so many response tokens has its last token."""
        self._finished.append((time.monotonic(), tokens))

    async def measure_curve(self) -> None:
        """Once, on the idle engine, where the planner of moves needs it."""
        config = self.context.config
        forced = config.pipeline.repack != "auto" and config.pipeline.repack_requests is not None
        alone = config.rollout.most == 1 or config.environment.stays
        if not config.pipeline.empties or alone or forced or self._curve:
            return
        limit = min(CURVE_MAX_REQUESTS, config.rollout.max_concurrent)
        self._curve = await self.engines.current.decode_curve(limit, CURVE_CONTEXT)
        text = "decode curve (requests, seconds per step) %s: %d requests saturate the engine"
        logger.info(text, self._curve, saturation_requests(self._curve))

    async def run(self) -> None:
        """Until it is cancelled: once a second, or more often for repack, what the next ping will say."""
        channel, pipeline = self.context.channel, self.context.config.pipeline
        while True:
            utilization = await self.engines.current.utilization()
            self._look(utilization)
            channel.load = self._report(utilization)
            if not pipeline.empties:
                await asyncio.sleep(REPORT_SECONDS)
            else:  # the planner decides by what is reported
                channel.send(Ping(channel.load))
                await asyncio.sleep(min(REPORT_SECONDS, pipeline.repack_seconds))

    def _look(self, utilization: Utilization | None) -> None:
        engine, now = self.engines.current, own_time()
        if engine is not self._watched:
            self._watch = EngineWatch()
            self._watched = engine
        if self._watch.look(now, self.batch.generating, (utilization, self.batch.progress)):
            seconds, limit = self._watch.standing(now), self._watch.limit
            text = f"{engine.name} has made no progress for {seconds:.0f} s (its limit is {limit:.0f} s)"
            self.batch.fail(EngineHangs(text))

    def _report(self, utilization: Utilization | None) -> ReplicaLoad:
        """`utilization` is None when the engine does not say."""
        waiting = self.batch.waiting
        return ReplicaLoad(
            self.state.phase.value,
            self.state.weight_id,
            self.state.in_flight,
            self.scoring(),
            waiting=len(waiting),
            waiting_tokens=sum(
                len(trajectory.group.prompt_tokens) + trajectory.partial.count for trajectory in waiting
            ),
            tokens_per_second=self._rate(),
            decode_curve=self._curve,
            held=self.state.held,
            **(dataclasses.asdict(utilization) if utilization else {}),
        )

    def _rate(self) -> float:
        while self._finished and self._finished[0][0] < time.monotonic() - RATE_SECONDS:
            self._finished.popleft()
        return sum(tokens for _, tokens in self._finished) / RATE_SECONDS
