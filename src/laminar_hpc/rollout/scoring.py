"""Rewards of finished trajectories: computed behind the local batch, so that they delay no pull."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.messages.data import PromptGroup, Sample
from laminar_hpc.messages.rollouts import Scored, ScoreOrder
from laminar_hpc.rollout.tokens import TextDecoder

logger = logging.getLogger(__name__)


class Scoring:
    """`pool` is started and closed by the caller. `failed(error)` is called when no reward worker can be
    started any more."""

    def __init__(
        self, context: RoleContext, pool: RewardPool, failed: Callable[[BaseException], None]
    ) -> None:
        self.context, self.pool, self.failed = context, pool, failed
        self.decoder = TextDecoder(Path(context.config.model.path))
        self._tasks: dict[asyncio.Task[None], tuple[str, Sample]] = {}

    @property
    def pending(self) -> int:
        """Trajectories whose reward is awaited."""
        return len(self._tasks)

    @property
    def samples(self) -> list[Sample]:
        """Those of them that are for training."""
        return [sample for evaluation, sample in self._tasks.values() if not evaluation]

    def begin(
        self, evaluation: str, group: PromptGroup, trajectory_id: int, attempt: int, tokens: list[int]
    ) -> None:
        """Scored is sent when the reward is there. `tokens`: the whole response."""
        task = asyncio.create_task(self._score(evaluation, group, trajectory_id, attempt, tokens))
        self._tasks[task] = evaluation, Sample(trajectory_id, attempt)
        task.add_done_callback(self._done)

    def begin_ordered(self, order: ScoreOrder) -> None:
        """Of a response that another replica has generated."""
        self.begin("", order.group, order.trajectory_id, order.attempt, order.response_tokens)

    async def settle(self, seconds: float) -> None:
        """Before the replica leaves: waits for the last rewards, at most so long. Others score the rest, or
        the next controller has it scored."""
        limit = min(self.context.config.reward.timeout_seconds, seconds)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=limit)
            if late:
                logger.warning(
                    "%d scores were not there after %.1f s and are left to others", len(late), limit
                )

    async def _score(
        self, evaluation: str, group: PromptGroup, trajectory_id: int, attempt: int, tokens: list[int]
    ) -> None:
        score = await self.pool.score(group.prompt, self.decoder.text(tokens), group.row, tokens)
        self.context.trace.record("score", score.t0, score.t1, trajectory_id=trajectory_id)
        self.context.channel.send(
            Scored(
                trajectory_id,
                attempt,
                score.reward,
                score.parts,
                score.error,
                score.t1,
                evaluation,
            )
        )

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)
