"""Trajectories whose turns an agent asks for: a user's function that talks to the model by URL.

    the agent runs in an environment worker ------------------------------------> it returns the reward
       request -> its new messages are given -> turn -> the answer -> ... next request

The trajectory's prompt is the first token of every conversation; what the agent writes, from its first
message on, is given (talk.py). It does not move: it goes on here, or begins again elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.environments.gateway.chat import MODEL
from laminar_hpc.environments.gateway.dialogues import Dialogues
from laminar_hpc.environments.gateway.server import Gateway
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.environments.turns.episode import Episode
from laminar_hpc.environments.turns.session import AgentSession, EnvironmentFailed
from laminar_hpc.environments.workers.protocol import CallResult
from laminar_hpc.line.context import RoleContext
from laminar_hpc.rollout.batch import Turn
from laminar_hpc.rollout.episodes import Episodes
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.move_source import HandOver
from laminar_hpc.rollout.talk import Talk

logger = logging.getLogger(__name__)


class AgentEpisodes(Episodes):
    """See Episodes."""

    def __init__(self, context: RoleContext, stop_ids: Sequence[int], hand_over: HandOver) -> None:
        super().__init__(context, stop_ids, hand_over)
        self.gateway = Gateway(context.config.sampling.max_response_tokens, self.branches)
        model, arguments = Path(context.config.model.path), context.config.data.chat_template_arguments
        self.dialogues = Dialogues(model, stop_ids, self.limits.history == "refuse", arguments)

    async def start(self) -> None:
        """Raises LaminarError for an agent that cannot be used."""
        await asyncio.gather(self.pool.start(), self.gateway.start())
        if why := await self.dialogues.start():
            logger.warning("agents of this run can have no tools: %s", why)

    async def close(self) -> None:
        """Ends all agents."""
        await self.gateway.close()
        await super().close()

    # ---- one trajectory ------------------------------------------------------------------------------------

    async def _episode(self, trajectory: TrajectoryInFlight, turn: Turn) -> Outcome:
        trajectory.episode = Episode(self.limits, trajectory.partial.time_started or time.time())
        trajectory.bound = self.bound
        trajectory.finish_reason = ""
        t0 = time.time()
        session = await self.pool.open(trajectory.group.row)
        assert isinstance(session, AgentSession)
        trajectory.session = session
        trajectory.episode.reset(t0, time.time() - t0)
        door = self.gateway.open()
        trajectory.episode.refusals = door.refusals
        agent = asyncio.create_task(session.run(base_url=door.url, api_key=door.key, model=MODEL))
        try:
            talk = Talk(self.dialogues, self.branches, trajectory, door, turn, self._waited)
            outcome = await talk.held(agent)
            if not (outcome.moved_away or outcome.lost):
                trajectory.score = self._scored(talk, agent)
            return outcome
        except EnvironmentFailed as error:
            if door.refusals and (last := door.refusals[-1]) not in str(error):
                error.args = (f"{error}; its last request that was refused: {last}",)
            raise
        finally:
            self.gateway.shut(door)
            self.let_go(trajectory)
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)

    def _scored(self, talk: Talk, agent: asyncio.Task[CallResult]) -> Score:
        """What the agent has returned. Raises EnvironmentFailed; but behind a limit whatever an agent does is
        graded, as nothing else was to be had."""
        try:
            if not agent.done():
                raise EnvironmentFailed("the agent did not return")
            result = agent.result()
            if result.reward is None and self.grades:
                raise EnvironmentFailed("the agent returned no reward, and reward.function is not set")
            return Score(result.reward or 0.0, result.parts, "", result.t0, result.t1)
        except EnvironmentFailed as error:
            if not talk.limited:
                raise
            instead, now = self.context.config.reward.score_on_failure, time.time()
            return Score(
                instead, {}, f"{error}, behind the limit '{talk.trajectory.finish_reason}'", now, now
            )

    def _waited(self, trajectory: TrajectoryInFlight, t0: float) -> None:
        """For the agent's next request."""
        self.calls.record(trajectory, t0, "agent")

    async def grade(self, trajectory: TrajectoryInFlight) -> Score:
        """See Episodes."""
        assert trajectory.score is not None
        return trajectory.score
