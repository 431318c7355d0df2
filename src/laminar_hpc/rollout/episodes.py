"""Trajectories of several turns: the loop around a local batch's requests, and their rewards.

    reset -> turn -> its calls, answered -> turn ... -> a final answer or a limit -> graded
      ^                    |
      '--- EnvironmentFailed, at most TRIES times: from the prompt, in a fresh environment; once the local
           batch nears its end elsewhere, so that nobody waits for it

A trajectory that waits for a tool holds its replica's weights (it counts as in flight) and no place among
the requests; its KV cache stays in the engine's prefix cache, under its weight id. It moves, also while it
waits: its calls are made to their end here, and what came of them follows it (turn_calls.py). It is rescued
from its tokens; if a replica died while it made its calls, it begins again, so that no call is made twice. An
environment of a factory stays here when its trajectory moves, and is asked from there (homes.py). Where an
agent asks for the turns nothing moves, nor with environment.history=branch: each has its turns as messages
(environments/turns/history.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.engine.interface import EngineDied, EngineHangs
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.environments.turns.episode import BUSY_SHARE, Episode, begins_again, patient
from laminar_hpc.environments.turns.history import History
from laminar_hpc.environments.turns.pool import EnvironmentPool
from laminar_hpc.environments.turns.session import EnvironmentFailed, Session
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.homes import replica_of
from laminar_hpc.rollout.answers import TrajectoryEnded
from laminar_hpc.rollout.batch import Turn
from laminar_hpc.rollout.homes import Home
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.move_source import HandOver
from laminar_hpc.rollout.turn_calls import TurnCalls

logger = logging.getLogger(__name__)


class Episodes:
    """A replica's. `run` is what its local batch does with each trajectory, `grade` what its scoring does."""

    Calls = TurnCalls

    def __init__(self, context: RoleContext, stop_ids: Sequence[int], hand_over: HandOver) -> None:
        self.context = context
        self.limits = context.config.environment
        self.bound = self.limits.stays
        self.branches = self.limits.history == "branch"
        self.stateful = bool(self.limits.factory) and not self.bound
        own = bool(self.limits.factory or self.limits.by_url)
        self.grades = own and not reward_functions(context.config.reward)
        self.pool = EnvironmentPool(self.limits)
        self.calls = self.Calls(context, stop_ids, self.stateful, hand_over)
        self.answers = self.calls.answers
        self.homes = self.calls.homes

    async def start(self) -> None:
        """Raises LaminarError for environments, templates and call formats that cannot be used."""
        await self.pool.start()
        for name, tools in self.pool.tools.items():
            await self.calls.learn(name, tools)

    async def close(self) -> None:
        """Ends all environments."""
        await self.calls.close()
        await self.pool.close()

    @property
    def for_others(self) -> bool:
        """Calls are made here, or environments are here, for trajectories that are elsewhere."""
        return self.answers.made_for_others or self.homes.for_others

    # ---- one trajectory ------------------------------------------------------------------------------------

    async def run(
        self, trajectory: TrajectoryInFlight, turn: Turn, young: Callable[[], bool] = lambda: True
    ) -> Outcome:
        """From where it is to its last token. `young`: most of its local batch is still under way."""
        why, tries, again = "", 0, True
        while again:
            tries += 1
            try:
                return await self._episode(trajectory, turn)
            except TrajectoryEnded as ended:
                return ended.outcome
            except EnvironmentFailed as error:
                why = str(error)
                logger.warning(
                    "trajectory %d begins again: its environment: %s", trajectory.trajectory_id, why
                )
                trajectory.begin_again()
                trajectory.failures += 1
                again = begins_again(tries, young() or bool(trajectory.evaluation))
        return Outcome(lost=f"its environment failed {tries} times, at last: {why}", ungraded=tries)

    async def _episode(self, trajectory: TrajectoryInFlight, turn: Turn) -> Outcome:
        whole = stays = False
        try:
            outcome = await self._turns(trajectory, turn)
            whole = not outcome.moved_away and outcome.lost is None
            stays = outcome.moved_away
            return outcome
        except TrajectoryEnded as ended:
            stays = ended.outcome.moved_away
            raise
        except (asyncio.CancelledError, EngineDied, EngineHangs):
            stays = not trajectory.bound
            raise
        finally:
            if whole:  # `grade` or `let_go` follows
                self.homes.take(trajectory.partial.home)
            elif stays and self.stateful and not (trajectory.is_dropped() or trajectory.evaluation):
                self.homes.leaves(trajectory)
            else:
                self.let_go(trajectory)

    async def _turns(self, trajectory: TrajectoryInFlight, turn: Turn) -> Outcome:
        trajectory.episode = Episode(self.limits, trajectory.partial.time_started or time.time())
        trajectory.bound = self.bound
        if self.stateful and not self._finds_home(trajectory):
            trajectory.begin_again()
        if (why := self._resumed(trajectory, trajectory.episode)) is not None:
            return Outcome(lost=why)
        if not trajectory.partial.home:
            await self._begin(trajectory, trajectory.episode)
        if self.calls.ends_a_turn(trajectory.partial):
            trajectory.finish_reason = "stop"
            trajectory.episode.turns += 1
            if not await self._answered(trajectory, trajectory.episode):
                return Outcome()
        seen = 0  # tokens that this engine has had
        while True:
            trajectory.cached_tokens = 0
            before = trajectory.partial.tokens
            t0 = time.time()
            outcome = await turn(trajectory)
            if outcome.moved_away or outcome.lost is not None:
                return outcome
            if not trajectory.partial.tokens.startswith(before):
                return Outcome(lost="its earlier turns are not what they were")
            trajectory.episode.waited(trajectory.waited)
            trajectory.episode.turn(seen, trajectory.cached_tokens, time.time() - t0 - trajectory.waited)
            seen = len(trajectory.sequence)
            if not await self._answered(trajectory, trajectory.episode):
                return outcome
            seen = 0 if trajectory.history is not None and trajectory.history.anew else seen

    def _finds_home(self, trajectory: TrajectoryInFlight) -> bool:
        """Whether its environment is where its tokens say; if not, it begins again."""
        home = trajectory.partial.home
        here = replica_of(home) == self.context.index
        return self.homes.back(trajectory) if here else bool(home)

    async def _begin(self, trajectory: TrajectoryInFlight, episode: Episode) -> None:
        """Its environment is reset; what reset says stands behind the prompt."""
        t0 = time.time()
        with self.calls.recorded(trajectory, "reset" if self.limits.factory else ""):
            trajectory.session = await self.pool.open(trajectory.group.row, patient(trajectory.failures + 1))
        episode.reset(t0, time.time() - t0)
        talk = self.calls.dialogue(trajectory.group.row).conversation
        if self.limits.factory:
            if self.stateful:
                self.homes.begin(trajectory)
            opening = talk.opening(trajectory.session.observation or "")
            if len(opening) >= trajectory.room:
                raise EnvironmentFailed(
                    f"reset: its text leaves no room of {trajectory.room} tokens to answer"
                )
            trajectory.give(opening)
            trajectory.told = 0
            self.calls.tell(trajectory)
        if self.branches:
            trajectory.history = History(talk, self.calls.text(trajectory.sequence))

    def _resumed(self, trajectory: TrajectoryInFlight, episode: Episode) -> str | None:
        """Counts what is known of one that comes from elsewhere. Why it cannot go on."""
        part = trajectory.partial
        for at, span in enumerate(part.spans):
            following = part.spans[at + 1].start if at + 1 < len(part.spans) else part.count
            if following > span.end:
                found = self.calls.found(trajectory, span)
                episode.turns += 1
                episode.calls += len(found) if isinstance(found, list) else 0
        lost = part.called and not part.awaits
        return "its replica ended while it waited for a tool" if lost else None

    async def _answered(self, trajectory: TrajectoryInFlight, episode: Episode) -> bool:
        """The calls of its last turn are made and their results given. False when there are none, or no more
        may be made: it has ended."""
        if trajectory.finish_reason != "stop":
            return False
        found = self.calls.found(trajectory, trajectory.partial.spans[-1])
        if not found:
            return False
        names = [call.name for call in found] if isinstance(found, list) else []
        if not trajectory.partial.awaits and (limit := episode.limit(names, time.time())):
            trajectory.finish_reason = limit
            return False
        answer = await self.calls.answer(trajectory, found)
        episode.called(names, answer.failed, answer.seconds)
        given = np.frombuffer(answer.tokens, "<i4").tolist()
        if len(given) >= trajectory.room:
            trajectory.finish_reason = "length"
            return False
        if trajectory.history is not None and trajectory.history.anew:
            trajectory.branch()
        trajectory.give(given)
        self.calls.tell(trajectory)
        return True

    # ---- rewards -------------------------------------------------------------------------------------------

    async def grade(self, trajectory: TrajectoryInFlight) -> Score:
        """Calls the environment's get_reward. Raises EnvironmentFailed."""
        assert trajectory.session is not None
        return await _reward(trajectory.session)

    def graded_elsewhere(self, trajectory: TrajectoryInFlight) -> bool:
        """Tells whether the environment grades it and is at another replica."""
        return self.stateful and self.grades and trajectory.session is None

    async def grade_of(self, home: Home, figures: dict[str, float]) -> Score:
        """Of a trajectory that has ended elsewhere, with its episode's figures. Raises EnvironmentFailed."""
        own = home.episode.figures(time.time())
        busy = {name: own[name] for name in (BUSY_SHARE,) if name in own}
        score = await _reward(home.session)
        return replace(score, parts=score.parts | figures | busy)

    def let_go(self, trajectory: TrajectoryInFlight) -> None:
        """The trajectory's environment is no longer needed."""
        self.homes.take(trajectory.partial.home)
        if trajectory.session is not None:
            trajectory.session.close()
            trajectory.session = None


async def _reward(session: Session) -> Score:
    result = await session.reward()
    return Score(result.reward or 0.0, result.parts, "", result.t0, result.t1)
