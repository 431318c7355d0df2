"""Trajectories of several turns: the loop around a local batch's requests, and their rewards.

    reset -> turn -> its calls, answered -> turn ... -> a final answer or a limit -> graded
      ^                    |
      '--- EnvironmentFailed, at most TRIES times: from the prompt, in a fresh environment; once the local
           batch nears its end elsewhere, so that nobody waits for it

A trajectory that waits for a tool holds its replica's weights (it counts as in flight) and no place among
the requests; its KV cache stays in the engine's prefix cache, under its weight id. It moves, also while it
waits: its calls are made to their end here, and what came of them follows it (answers.py). It is rescued from
its tokens; if a replica died while it made its calls, it begins again, so that no call is made twice. An
environment of a factory stays here when its trajectory moves, and is asked from there (homes.py). Where an
agent asks for the turns nothing moves, nor with environment.history=branch: each has its turns as messages
(turns/history.py).
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.engine.interface import EngineDied, EngineHangs
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.messages.data import Partial, VersionSpan
from laminar_hpc.messages.homes import Ask, replica_of
from laminar_hpc.messages.moves import Answer
from laminar_hpc.messages.rollouts import Increment
from laminar_hpc.payload.layout import Tokens, tokens_array
from laminar_hpc.rollout.answers import Answers, Ended, name_of
from laminar_hpc.rollout.batch import Turn
from laminar_hpc.rollout.homes import Home, Homes
from laminar_hpc.rollout.work import Outcome, Work, tokens_of
from laminar_hpc.turns.calls import Malformed, ToolCall
from laminar_hpc.turns.conversation import ToolResult
from laminar_hpc.turns.dialogue import Dialogue, with_answers
from laminar_hpc.turns.episode import BUSY_SHARE, Episode, begins_again, patient
from laminar_hpc.turns.history import History
from laminar_hpc.turns.pool import EnvironmentPool, environment_of
from laminar_hpc.turns.session import EnvironmentFailed, EnvironmentHangs, Session
from laminar_hpc.turns.tools import error_text, is_error

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

    def __init__(self, context: RoleContext, stop_ids: Sequence[int]) -> None:
        self.context, self.limits = context, context.config.environment
        self.bound, self.branches = self.limits.stays, self.limits.history == "branch"
        self.stateful = bool(self.limits.factory) and not self.bound
        own = bool(self.limits.factory or self.limits.by_url)
        self.grades = own and not reward_functions(context.config.reward)
        self.pool, self.answers = EnvironmentPool(self.limits), Answers(context.channel)
        kept = self.limits.max_seconds + self.limits.timeout_seconds
        self.homes = Homes(context.index, context.channel, self._made_for_others, kept)
        self._stop_ids, self._model = frozenset(stop_ids), Path(context.config.model.path)
        self._decoder = TextDecoder(self._model)
        self.young: Callable[[], bool] = lambda: True  # of the local batch most is still under way
        self._talks: dict[str, Dialogue] = {}  # by name of the environment

    async def start(self) -> None:
        """Raises LaminarError for environments, templates and call formats that cannot be used."""
        await self.pool.start()
        for name, tools in self.pool.tools.items():
            grows = self.limits.history == "refuse"
            made = await asyncio.to_thread(with_answers, str(self._model), tools, grows)
            self._talks[name] = made
            assert made.parser is not None
            logger.info("tool calls are read by SGLang's parser '%s'", made.parser.name)

    async def close(self) -> None:
        """Ends all environments."""
        await self.answers.close()
        await self.homes.close()
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
            work.patient = patient(tries)
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
        if self._ends_a_turn(work.partial):
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
        with self._recorded(work, "reset" if self.limits.factory else ""):
            work.session = await self.pool.open(work.group.row, work.patient)
        episode.reset(t0, time.time() - t0)
        if self.limits.factory:
            if self.stateful:
                self.homes.begin(work)
            opening = self._dialogue(work.group.row).conversation.opening(work.session.observation or "")
            if len(opening) >= work.room:
                raise EnvironmentFailed(f"reset: its text leaves no room of {work.room} tokens to answer")
            work.give(opening)
            work.told = 0
            self._tell(work)
        if self.branches:
            work.history = History(self._dialogue(work.group.row).conversation, self._text(work.sequence))

    def _resumed(self, work: Work, episode: Episode) -> str | None:
        """Counts what is known of one that comes from elsewhere. Why it cannot go on."""
        part = work.partial
        for at, span in enumerate(part.spans):
            following = part.spans[at + 1].start if at + 1 < len(part.spans) else part.count
            if following > span.end:
                found = self._calls(work, span)
                episode.turns += 1
                episode.calls += len(found) if isinstance(found, list) else 0
        lost = part.called and not part.awaits
        return "its replica ended while it waited for a tool" if lost else None

    def _ends_a_turn(self, part: Partial) -> bool:
        """It has moved with its turn's last token, before anybody looked for calls."""
        drawn_last = bool(part.spans) and part.spans[-1].end == part.count
        return drawn_last and int(tokens_of(part)[-1]) in self._stop_ids

    async def _answered(self, work: Work, episode: Episode) -> bool:
        """The calls of its last turn are made and their results given. False when there are none, or no more
        may be made: it has ended."""
        if work.finish_reason != "stop":
            return False
        found = self._calls(work, work.partial.spans[-1])
        if not found:
            return False
        names = [call.name for call in found] if isinstance(found, list) else []
        if not work.partial.awaits and (limit := episode.limit(names, time.time())):
            work.finish_reason = limit
            return False
        answer = await self._answer(work, found, names)
        episode.called(names, answer.failed, answer.seconds)
        given = np.frombuffer(answer.tokens, "<i4").tolist()
        if len(given) >= work.room:
            work.finish_reason = "length"
            return False
        if work.history is not None and work.history.anew:
            work.branch()
        work.give(given)
        self._tell(work)
        return True

    async def _answer(self, work: Work, found: list[ToolCall] | Malformed, names: list[str]) -> Answer:
        """What the calls of its last turn come to, wherever they are made; the controller knows of them
        before. Raises Ended and EnvironmentFailed."""
        part, last = work.partial, int(tokens_of(work.partial)[-1])
        away = self.stateful and work.session is None and isinstance(found, list)
        maker = replica_of(part.home) if away else self.context.index
        name = part.awaits or name_of(maker, work.trajectory_id, work.attempt, part.count)
        elsewhere = bool(part.awaits) or away
        part.called, part.awaits = True, name if elsewhere else ""
        self._tell(work)
        if not elsewhere:
            making = self._made(work, work.session, name, found, last)
            return await self.answers.made_here(work, name, making)
        if self.stateful and isinstance(found, list):  # the same name is called once
            calls = [(call.name, json.dumps(call.arguments)) for call in found]
            self.context.channel.send(Ask(work.trajectory_id, part.home, name, calls, last))
        waiting = self.answers.made_elsewhere(work, max(1, len(names)) * self.limits.timeout_seconds)
        if not away:  # who makes them records them
            return await waiting
        with self._recorded(work, _what(found)):
            return await waiting

    async def _made(
        self,
        work: Work,
        session: Session | None,
        name: str,
        found: list[ToolCall] | Malformed,
        last: int,
    ) -> Answer:
        """The calls of its last turn."""
        t0 = time.time()
        self.homes.calls(work, name)
        try:
            with self._recorded(work, _what(found)):
                results = await self._results(session, found)
        except EnvironmentFailed:
            self.homes.failed(work)
            raise
        given = self._behind(work, results)
        answer = self._told(work.trajectory_id, name, work.group.row, results, last, t0, given)
        self.homes.calls(work, name, answer)
        return answer

    def _behind(self, work: Work, results: list[ToolResult]) -> list[int] | None:
        """What begins a branch, where the template has rewritten earlier turns."""
        if work.history is None:
            return None
        span, stopped = work.partial.spans[-1], int(work.sequence[-1]) in self._stop_ids
        seen, end = work.sequence, work.partial.count - stopped
        said = tokens_of(work.partial)[span.start : end]
        return work.history.answered(self._text(seen[: len(seen) - stopped]), self._text(said), results)

    def _text(self, tokens: Tokens) -> str:
        return self._decoder.text(tokens.tolist(), specials=True)

    async def _made_for_others(self, home: Home, ask: Ask) -> Answer:
        """Calls in an environment here whose trajectory is elsewhere."""
        t0 = time.time()
        found = [ToolCall(name, json.loads(arguments)) for name, arguments in ask.calls]
        results = await self._results(home.session, found)
        answer = self._told(ask.trajectory_id, ask.name, home.row, results, ask.last, t0)
        home.episode.worked_seconds += answer.seconds
        return answer

    def _told(
        self,
        trajectory_id: int,
        name: str,
        row: dict,
        results: list[ToolResult],
        last: int,
        t0: float,
        given: list[int] | None = None,
    ) -> Answer:
        """`last`: the token that they stand behind; `t0`: when the calls began; `given`: in place of them."""
        failed = sum(is_error(result.content) for result in results)
        if given is None:
            given = self._dialogue(row).conversation.between(last, results)
        return Answer(trajectory_id, name, tokens_array(given).tobytes(), failed, time.time() - t0)

    async def _results(self, session: Session | None, found: list[ToolCall] | Malformed) -> list[ToolResult]:
        """One after the other, as they may depend on each other."""
        if isinstance(found, Malformed):
            return [ToolResult("error", error_text(found.reason))]
        assert session is not None
        return [ToolResult(call.name, await session.call(call.name, call.arguments)) for call in found]

    def _dialogue(self, row: dict) -> Dialogue:
        return self._talks[environment_of(self.limits, row)]

    def _calls(self, work: Work, span: VersionSpan) -> list[ToolCall] | Malformed:
        """Of one turn, whose stop token is no part of a call."""
        tokens = tokens_of(work.partial)[span.start : span.end].tolist()
        said = tokens[:-1] if tokens[-1] in self._stop_ids else tokens
        parser = self._dialogue(work.group.row).parser
        assert parser is not None
        return parser.calls(self._decoder.text(said, specials=True))

    def _tell(self, work: Work) -> None:
        """The pool knows all of it: what stands between a whole turn and its result tells of a call that may
        have been made."""
        part, start = work.partial, work.told
        if not self.context.config.rollout.increment_tokens or work.evaluation or work.bound:
            return
        spans = [VersionSpan(s.weight_id, max(s.start, start), s.end) for s in part.spans if s.end > start]
        columns = part.tokens[4 * start :], part.logprobs[4 * start :]
        told = (work.trajectory_id, work.attempt, start, *columns, spans, part.time_started)
        self.context.channel.send(Increment(*told, part.called, part.awaits, part.home))
        work.told = part.count

    @contextlib.contextmanager
    def _recorded(self, work: Work, what: str) -> Iterator[None]:
        """In the trace with how it ended; "" is nothing."""
        t0 = time.time()
        try:
            yield
        except EnvironmentFailed as error:
            self._record(work, t0, what, "hung" if isinstance(error, EnvironmentHangs) else "failed")
            raise
        if what:
            self._record(work, t0, what)

    def _record(self, work: Work, t0: float, what: str, failed: str = "") -> None:
        of = {"trajectory_id": work.trajectory_id, "attempt": work.attempt, "evaluation": work.evaluation}
        more = {"failed": failed} if failed else {}
        self.context.trace.record("tool", t0, time.time(), **of, what=what, waited=work.waited, **more)

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


def _what(found: list[ToolCall] | Malformed) -> str:
    """The calls of a turn, in the trace."""
    return "malformed" if isinstance(found, Malformed) else ",".join(call.name for call in found)


async def _reward(session: Session) -> Score:
    result = await session.reward()
    return Score(result.reward or 0.0, result.parts, "", result.t0, result.t1)
