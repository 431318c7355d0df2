"""Rewards of finished trajectories: computed behind the local batch, so that they delay no pull."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.data.tokens import TextDecoder, stop_token_ids
from laminar_hpc.environments.reward_pool import RewardPool, Score
from laminar_hpc.environments.turns.session import EnvironmentFailed
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import PromptGroup, ResponsePlace, Sample
from laminar_hpc.line.messages.rollouts import Lost, Scored, ScoreOrder
from laminar_hpc.rollout.episodes import Episodes
from laminar_hpc.rollout.homes import Home
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.partial_response import tokens_of
from laminar_hpc.store.payload.layout import Response, Tokens, drawn, last_drawn

logger = logging.getLogger(__name__)


class Scoring:
    """`pool` is started and closed by the caller. `failed(error)` is called when no reward worker can be
    started any more. `read`: responses that others have generated. `episodes`: where trajectories have
    several turns."""

    def __init__(
        self,
        context: RoleContext,
        pool: RewardPool,
        failed: Callable[[BaseException], None],
        read: Callable[[Sequence[tuple[int, ResponsePlace]]], list[Response]],
        episodes: Episodes | None = None,
    ) -> None:
        self.context = context
        self.pool = pool
        self.failed = failed
        self._read = read
        self.episodes = episodes
        model = Path(context.config.model.path)
        self.decoder = TextDecoder(model)
        self._ends = stop_token_ids(model)
        self._tasks: dict[asyncio.Task[None], tuple[str, Sample]] = {}

    @property
    def pending(self) -> int:
        """Trajectories whose reward is awaited."""
        return len(self._tasks)

    @property
    def samples(self) -> list[Sample]:
        """Those of them that are for training."""
        return [sample for evaluation, sample in self._tasks.values() if not evaluation]

    def begin(self, trajectory: TrajectoryInFlight) -> None:
        """Of a complete response that was generated here. Scored is sent when the reward is there, by the
        replica with its environment where that is another one."""
        sample = Sample(trajectory.trajectory_id, trajectory.attempt)
        if self.episodes is not None:
            if self.graded_elsewhere(trajectory):
                return
            self._add(trajectory.evaluation, sample, self._score_episode(self.episodes, trajectory, sample))
            return
        whole = tokens_of(trajectory.partial)
        self._add(
            trajectory.evaluation, sample, self._score(trajectory.evaluation, trajectory.group, sample, whole)
        )

    def graded_elsewhere(self, trajectory: TrajectoryInFlight) -> bool:
        """Tells whether the environment is at another replica, which grades it there."""
        return self.episodes is not None and self.episodes.graded_elsewhere(trajectory)

    def begin_ordered(self, order: ScoreOrder) -> None:
        """Scores a response that another replica has generated."""
        sample = Sample(order.trajectory_id, order.attempt)
        home = self.episodes.homes.take(order.home) if self.episodes is not None and order.home else None
        if self.episodes is not None and home is not None:
            self._add("", sample, self._grade_home(self.episodes, home, order, sample))
        else:
            self._add("", sample, self._score_ordered(order, sample))

    def _add(self, evaluation: str, sample: Sample, scoring: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(scoring)
        self._tasks[task] = evaluation, sample
        task.add_done_callback(self._done)

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

    async def _score_ordered(self, order: ScoreOrder, sample: Sample) -> None:
        wanted = [(order.trajectory_id, order.place)]
        try:
            [response] = await asyncio.to_thread(self._read, wanted)
        except LaminarError as error:
            self.context.channel.send(Lost(order.trajectory_id, order.attempt, str(error)))
            return
        if self.episodes is not None and self.episodes.grades:
            reason = "its environment has ended with its replica"
            self.context.channel.send(Lost(order.trajectory_id, order.attempt, reason))
            return
        answer = last_drawn(response.tokens, response.mask_runs)
        await self._score("", order.group, sample, answer)

    async def _grade_home(self, episodes: Episodes, home: Home, order: ScoreOrder, sample: Sample) -> None:
        """Has an environment that stayed here grade the trajectory."""
        try:
            self._say("", sample, await episodes.grade_of(home, order.figures), {})
        except EnvironmentFailed as error:
            reason = f"its environment: {error}"
            self.context.channel.send(Lost(sample.trajectory_id, sample.attempt, reason, ungraded=1))
        finally:
            home.session.close()

    async def _score_episode(
        self, episodes: Episodes, trajectory: TrajectoryInFlight, sample: Sample
    ) -> None:
        """Returns the environment's reward, or that of the last turn."""
        episode, part = trajectory.episode, trajectory.partial
        figures = episode.figures(time.time()) if episode else {}
        refused = episode.refusals[0] if episode and episode.refusals else ""
        try:
            if episodes.grades:
                self._say(trajectory.evaluation, sample, await episodes.grade(trajectory), figures, refused)
                return
            answer = last_drawn(tokens_of(part), drawn(part.count, part.spans))
            await self._score(trajectory.evaluation, trajectory.group, sample, answer, figures, refused)
        except EnvironmentFailed as error:
            self.ungraded(trajectory, f"its environment: {error}")
        finally:
            episodes.let_go(trajectory)

    def ungraded(self, trajectory: TrajectoryInFlight, reason: str) -> None:
        """Its environment failed: it is not trained. In an evaluation it counts as a reward that failed."""
        trajectory_id, attempt = trajectory.trajectory_id, trajectory.attempt
        if trajectory.evaluation:
            reward = self.context.config.reward.score_on_failure
            scored = Scored(trajectory_id, attempt, reward, {}, reason, time.time(), trajectory.evaluation)
            self.context.channel.send(scored)
        else:
            self.context.channel.send(Lost(trajectory_id, attempt, reason, ungraded=1))

    async def _score(
        self,
        evaluation: str,
        group: PromptGroup,
        sample: Sample,
        response: Tokens,
        figures: dict[str, float] | None = None,
        refused: str = "",
    ) -> None:
        tokens = response.tolist()
        said = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens  # it need not be marked special
        score = await self.pool.score(group.prompt, self.decoder.text(said), group.row, tokens)
        self._say(evaluation, sample, score, figures or {}, refused)

    def _say(
        self, evaluation: str, sample: Sample, score: Score, figures: dict[str, float], refused: str = ""
    ) -> None:
        """`figures` of its episode stand among the parts of its reward."""
        trajectory_id, attempt = sample.trajectory_id, sample.attempt
        self.context.trace.record("score", score.t0, score.t1, trajectory_id=trajectory_id)
        outcome = score.reward, score.parts | figures, score.error, score.t1
        self.context.channel.send(Scored(trajectory_id, attempt, *outcome, evaluation, refused))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)
