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
(turns/history.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.engine.interface import EngineDied, EngineHangs
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.messages.homes import replica_of
from laminar_hpc.rollout.answers import Ended
from laminar_hpc.rollout.batch import Turn
from laminar_hpc.rollout.homes import Home
from laminar_hpc.rollout.turn_calls import TurnCalls
from laminar_hpc.rollout.work import Outcome, Work
from laminar_hpc.turns.episode import BUSY_SHARE, Episode, begins_again, patient
from laminar_hpc.turns.history import History
from laminar_hpc.turns.pool import EnvironmentPool
from laminar_hpc.turns.session import EnvironmentFailed, Session

logger = logging.getLogger(__name__)


def new_episodes(context: RoleContext, stop_ids: Sequence[int]) -> "Episodes | None":
    """A replica's, where the run's trajectories have several turns."""
    environment = context.config.environment
    if environment.by_url:
        from laminar_hpc.rollout.agents import AgentEpisodes  # aiohttp's server takes a third of a second

        return AgentEpisodes(context, stop_ids)
    return Episodes(context, stop_ids) if environment.several else None


class Episodes:
    """A replica's. `run` is what its local batch does with each trajectory, `grade` what its scoring does."""

    Calls = TurnCalls

    def __init__(self, context: RoleContext, stop_ids: Sequence[int]) -> None:
        self.context, self.limits = context, context.config.environment
        self.bound, self.branches = self.limits.stays, self.limits.history == "branch"
        self.stateful = bool(self.limits.factory) and not self.bound
        own = bool(self.limits.factory or self.limits.by_url)
        self.grades = own and not reward_functions(context.config.reward)
        self.pool = EnvironmentPool(self.limits)
        self.calls = self.Calls(context, stop_ids, self.stateful)
        self.answers, self.homes = self.calls.answers, self.calls.homes
        self.young: Callable[[], bool] = lambda: True  # of the local batch most is still under way

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

    async def run(self, work: Work, turn: Turn) -> Outcome:
        """From where it is to its last token."""
        why, tries, again = "", 0, True
        while again:
            tries += 1
            work.patient = patient(work.failures + tries)
            try:
                return await self._episode(work, turn)
            except Ended as ended:
                return ended.outcome
            except EnvironmentFailed as error:
                why = str(error)
                logger.warning("trajectory %d begins again: its environment: %s", work.trajectory_id, why)
                work.begin_again()
                again = begins_again(tries, self.young() or bool(work.evaluation))
        work.ungraded = tries
        return Outcome(lost=f"its environment failed {tries} times, at last: {why}")

    async def _episode(self, work: Work, turn: Turn) -> Outcome:
        whole = stays = False
        try:
            outcome = await self._turns(work, turn)
            whole = not outcome.moved_away and outcome.lost is None
            stays = outcome.moved_away
            return outcome
        except Ended as ended:
            stays = ended.outcome.moved_away
            raise
        except (asyncio.CancelledError, EngineDied, EngineHangs):
            stays = not work.bound
            raise
        finally:
            if whole:  # `grade` or `let_go` follows
                self.homes.take(work.partial.home)
            elif stays and self.stateful and not (work.dropped or work.evaluation):
                self.homes.leaves(work)
            else:
                self.let_go(work)

    async def _turns(self, work: Work, turn: Turn) -> Outcome:
        work.episode = Episode(self.limits, work.partial.time_started or time.time())
        work.bound = self.bound
        if self.stateful and not self._finds_home(work):
            work.begin_again()
        if (why := self._resumed(work, work.episode)) is not None:
            return Outcome(lost=why)
        if not work.partial.home:
            await self._begin(work, work.episode)
        if self.calls.ends_a_turn(work.partial):
            work.finish_reason = "stop"
            work.episode.turns += 1
            if not await self._answered(work, work.episode):
                return Outcome()
        seen = 0  # tokens that this engine has had
        while True:
            work.cached_tokens, before, t0 = 0, work.partial.tokens, time.time()
            outcome = await turn(work)
            if outcome.moved_away or outcome.lost is not None:
                return outcome
            if not work.partial.tokens.startswith(before):
                return Outcome(lost="its earlier turns are not what they were")
            work.episode.waited(work.waited)
            work.episode.turn(seen, work.cached_tokens, time.time() - t0 - work.waited)
            seen = len(work.sequence)
            if not await self._answered(work, work.episode):
                return outcome
            seen = 0 if work.history is not None and work.history.anew else seen

    def _finds_home(self, work: Work) -> bool:
        """Whether its environment is where its tokens say; if not, it begins again."""
        home = work.partial.home
        here = replica_of(home) == self.context.index
        return self.homes.back(work) if here else bool(home)

    async def _begin(self, work: Work, episode: Episode) -> None:
        """Its environment is reset; what reset says stands behind the prompt."""
        t0 = time.time()
        with self.calls.recorded(work, "reset" if self.limits.factory else ""):
            work.session = await self.pool.open(work.group.row, work.patient)
        episode.reset(t0, time.time() - t0)
        talk = self.calls.dialogue(work.group.row).conversation
        if self.limits.factory:
            if self.stateful:
                self.homes.begin(work)
            opening = talk.opening(work.session.observation or "")
            if len(opening) >= work.room:
                raise EnvironmentFailed(f"reset: its text leaves no room of {work.room} tokens to answer")
            work.give(opening)
            work.told = 0
            self.calls.tell(work)
        if self.branches:
            work.history = History(talk, self.calls.text(work.sequence))

    def _resumed(self, work: Work, episode: Episode) -> str | None:
        """Counts what is known of one that comes from elsewhere. Why it cannot go on."""
        part = work.partial
        for at, span in enumerate(part.spans):
            following = part.spans[at + 1].start if at + 1 < len(part.spans) else part.count
            if following > span.end:
                found = self.calls.found(work, span)
                episode.turns += 1
                episode.calls += len(found) if isinstance(found, list) else 0
        lost = part.called and not part.awaits
        return "its replica ended while it waited for a tool" if lost else None

    async def _answered(self, work: Work, episode: Episode) -> bool:
        """The calls of its last turn are made and their results given. False when there are none, or no more
        may be made: it has ended."""
        if work.finish_reason != "stop":
            return False
        found = self.calls.found(work, work.partial.spans[-1])
        if not found:
            return False
        names = [call.name for call in found] if isinstance(found, list) else []
        if not work.partial.awaits and (limit := episode.limit(names, time.time())):
            work.finish_reason = limit
            return False
        answer = await self.calls.answer(work, found)
        episode.called(names, answer.failed, answer.seconds)
        given = np.frombuffer(answer.tokens, "<i4").tolist()
        if len(given) >= work.room:
            work.finish_reason = "length"
            return False
        if work.history is not None and work.history.anew:
            work.branch()
        work.give(given)
        self.calls.tell(work)
        return True

    # ---- rewards -------------------------------------------------------------------------------------------

    async def grade(self, work: Work) -> Score:
        """By the environment's get_reward. Raises EnvironmentFailed."""
        assert work.session is not None
        return await _reward(work.session)

    def graded_elsewhere(self, work: Work) -> bool:
        """Its environment grades it, and is with another replica."""
        return self.stateful and self.grades and work.session is None

    async def grade_of(self, home: Home, figures: dict[str, float]) -> Score:
        """Of a trajectory that has ended elsewhere, with the figures of its episode. Raises
        EnvironmentFailed."""
        own = home.episode.figures(time.time())
        busy = {name: own[name] for name in (BUSY_SHARE,) if name in own}
        score = await _reward(home.session)
        return replace(score, parts=score.parts | figures | busy)

    def let_go(self, work: Work) -> None:
        """Its environment is not needed any more."""
        self.homes.take(work.partial.home)
        if work.session is not None:
            work.session.close()
            work.session = None


async def _reward(session: Session) -> Score:
    result = await session.reward()
    return Score(result.reward or 0.0, result.parts, "", result.t0, result.t1)
