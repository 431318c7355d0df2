"""A replica's local batch and its side of moves, without a worker: the test is its controller."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import EngineFactory
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import Message, Partial
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.line.messages.rollouts import Grant
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout.batch import LocalBatch
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.in_flight import granted
from laminar_hpc.rollout.migration import ReplicaMigration
from laminar_hpc.rollout.move_source import MoveSource
from laminar_hpc.rollout.state import ReplicaState

M = TypeVar("M", bound=Message)


class ReplicaSide:
    """`said`: what the controller hears; `ended`: trajectories that are whole or lost."""

    def __init__(self, config: RunConfig, folder: Path, new_engine: EngineFactory) -> None:
        self.said: list[Message] = []
        context = RoleContext(
            config,
            "rollout",
            0,
            "here",
            folder,
            SimpleNamespace(send=self.said.append),
            Welcome("run"),
            Trace(folder, "rollout", 0),
        )
        self.engines, self.state = EngineLives(new_engine, lambda: 0), ReplicaState()
        self.ended: dict[int, Partial] = {}
        moves = MoveSource(context, self.engines)
        self.batch = LocalBatch(
            context,
            self.engines,
            self.state,
            [],
            lambda trajectory, _: self.ended.setdefault(trajectory.trajectory_id, trajectory.partial),
            moves.hand_over,
            None,
        )
        self.migration = ReplicaMigration(self.batch, moves.mail, None)

    def grant(self, grant: Grant) -> asyncio.Task[None]:
        """On weights 0, which the engine has. Nothing of it has begun yet."""
        if self.state.weight_id is None:
            self.state.begin_pull(0)
            self.state.verified(0)
            self.state.open(0)
        trajectories = granted(grant)
        self.state.grant(0, len(trajectories))
        return asyncio.create_task(self.batch.run(trajectories))

    async def until_said(
        self, kind: type[M] | tuple[type[M], ...], seconds: float = 10.0, pause: float = 0.0
    ) -> M:
        """The first word of this kind, once it is said; looked for every `pause` seconds."""
        async with asyncio.timeout(seconds):
            while (word := next((each for each in self.said if isinstance(each, kind)), None)) is None:
                await asyncio.sleep(pause)
        return word
