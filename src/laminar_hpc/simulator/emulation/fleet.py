"""Several rollout workers with emulated engines in one process: real workers, each with its own channel, and
one pool of reward workers.

A replica whose engine dies leaves the run by itself, as a process of its own would; the others go on.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.factory import engine_factory
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.line.channel import Channel
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.membership import UNNUMBERED, Failure, Hello
from laminar_hpc.line.starter_id import own_starter_id
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.machine.processes import machine_name
from laminar_hpc.rollout.worker import RolloutWorker

logger = logging.getLogger(__name__)
NewWorker = Callable[[RoleContext, RewardPool], RolloutWorker]


def new_worker(context: RoleContext, pool: RewardPool) -> RolloutWorker:
    """A worker with the configured engine."""
    return RolloutWorker(context, engine_factory(context.config, context.index, context.run_dir), pool)


@dataclass
class EmulatedReplica:
    """One worker of the fleet and its line; with `index` UNNUMBERED the controller numbers it."""

    config: RunConfig
    index: int
    pool: RewardPool
    new_worker: NewWorker = new_worker
    worker: RolloutWorker | None = None

    async def run(self) -> None:
        """Runs until the controller says Stop. A replica that cannot go on tells the controller."""
        config, run_dir = self.config, Path(self.config.run_dir)
        machine = machine_name(config.relay.shm_dir)
        hello = Hello(
            "rollout", self.index, uuid.uuid4().hex[:8], os.getpid(), machine, starter_id=own_starter_id()
        )
        join, heartbeat = config.cluster.join_timeout_seconds, config.cluster.heartbeat_timeout_seconds
        channel = await asyncio.to_thread(Channel, run_dir, hello, join, heartbeat)
        self.index = channel.index
        trace, goodbye = Trace(run_dir, "rollout", self.index), False
        try:
            context = RoleContext(
                config, "rollout", self.index, machine, run_dir, channel, channel.welcome, trace
            )
            self.worker = self.new_worker(context, self.pool)
            await self.worker.run()
            goodbye = True
        except Exception as error:
            logger.warning(
                "replica %d ends: %s", self.index, error, exc_info=not isinstance(error, LaminarError)
            )
            channel.send(Failure(f"{type(error).__name__}: {error}"))
        finally:
            await asyncio.to_thread(channel.close, goodbye)
            trace.close()


async def run(config: RunConfig, first: int, count: int) -> None:
    """Runs replicas first ... first + count - 1, or `count` that the controller numbers where `first` is
    UNNUMBERED, until the last one has left."""
    indices = [UNNUMBERED] * count if first == UNNUMBERED else range(first, first + count)
    pool = RewardPool(config.reward, config.data.prompt_field)
    await pool.start()
    try:
        await asyncio.gather(*(EmulatedReplica(config, index, pool).run() for index in indices))
    finally:
        await pool.close()
