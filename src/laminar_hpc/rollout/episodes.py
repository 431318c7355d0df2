"""Trajectories of several turns: the loop around a local batch's requests, and their rewards.

    reset -> turn -> its calls, answered -> turn ... -> a final answer or a limit -> graded
      ^                    |
      '--- EnvironmentFailed, at most TRIES times: from the prompt, in a fresh environment; once the local
           batch nears its end elsewhere, so that nobody waits for it

A trajectory that waits for a tool holds its replica's weights (it counts as in flight) and no place among
the requests; its KV cache stays in the engine's prefix cache, under its weight id. One with an environment of
a factory does not move: it goes on here, or begins again elsewhere. One with functions moves, also while it
waits: its calls are made to their end here, and what came of them follows it (answers.py). It is rescued from
its tokens; if a replica died while it made its calls, it begins again, so that no call is made twice. With
environment.history=branch none moves: each has its turns as messages (turns/history.py).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.rewards import reward_functions
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.messages.data import Partial, VersionSpan
from laminar_hpc.messages.moves import Answer
from laminar_hpc.messages.rollouts import Increment
from laminar_hpc.payload.layout import Tokens, tokens_array
from laminar_hpc.rollout.answers import Answers, Ended, name_of
from laminar_hpc.rollout.batch import Turn
from laminar_hpc.rollout.work import Outcome, Work, tokens_of
from laminar_hpc.turns.calls import Malformed, ToolCall
from laminar_hpc.turns.conversation import ToolResult
from laminar_hpc.turns.dialogue import Dialogue, with_answers
from laminar_hpc.turns.episode import Episode, begins_again, patient
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
        own = bool(self.limits.factory or self.limits.by_url)
        self.grades = own and not reward_functions(context.config.reward)
        self.pool, self.answers = EnvironmentPool(self.limits), Answers(context.channel)
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
        await self.pool.close()

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
        work.episode = Episode(self.limits, work.partial.time_started or time.time())
        if (why := self._resumed(work, work.episode)) is not None:
            return Outcome(lost=why)
        work.bound, whole = self.bound, False
        try:
            t0 = time.time()
            await self._begin(work)
            work.episode.reset(t0, time.time() - t0)
            if self._ends_a_turn(work.partial):
                work.finish_reason = "stop"
                work.episode.turns += 1
                if not await self._answered(work, work.episode):
                    whole = True
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
                    whole = True
                    return outcome
                seen = 0 if work.history is not None and work.history.anew else seen
        finally:
            if not whole and work.session is not None:  # else `grade` or `let_go` follows
                self.let_go(work)

    async def _begin(self, work: Work) -> None:
        """Its environment is reset; what reset says stands behind the prompt."""
        with self._recorded(work, "reset" if self.limits.factory else ""):
            work.session = await self.pool.open(work.group.row, work.patient)
        if self.limits.factory:
            opening = self._dialogue(work).conversation.opening(work.session.observation or "")
            if len(opening) >= work.room:
                raise EnvironmentFailed(f"reset: its text leaves no room of {work.room} tokens to answer")
            work.give(opening)
        if self.branches:
            work.history = History(self._dialogue(work).conversation, self._text(work.sequence))

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
        made_elsewhere = work.partial.awaits
        if not made_elsewhere and (limit := episode.limit(names, time.time())):
            work.finish_reason = limit
            return False
        work.partial.called = True
        self._tell(work)
        if made_elsewhere:
            seconds = max(1, len(names)) * self.limits.timeout_seconds
            answer = await self.answers.made_elsewhere(work, seconds)
        else:
            name = name_of(self.context.index, work.trajectory_id, work.attempt, work.partial.count)
            answer = await self.answers.made_here(work, name, self._made(work, name, found, names))
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

    async def _made(
        self, work: Work, name: str, found: list[ToolCall] | Malformed, names: list[str]
    ) -> Answer:
        """The calls of its last turn."""
        t0, last, session = time.time(), int(tokens_of(work.partial)[-1]), work.session
        assert session is not None
        with self._recorded(work, ",".join(names) or "malformed"):
            results = await self._results(session, found)
        failed = sum(is_error(result.content) for result in results)
        given = self._behind(work, results)
        if given is None:
            given = self._dialogue(work).conversation.between(last, results)
        return Answer(work.trajectory_id, name, tokens_array(given).tobytes(), failed, time.time() - t0)

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

    async def _results(self, session: Session, found: list[ToolCall] | Malformed) -> list[ToolResult]:
        """One after the other, as they may depend on each other."""
        if isinstance(found, Malformed):
            return [ToolResult("error", error_text(found.reason))]
        return [ToolResult(call.name, await session.call(call.name, call.arguments)) for call in found]

    def _dialogue(self, work: Work) -> Dialogue:
        return self._talks[environment_of(self.limits, work.group.row)]

    def _calls(self, work: Work, span: VersionSpan) -> list[ToolCall] | Malformed:
        """Of one turn, whose stop token is no part of a call."""
        tokens = tokens_of(work.partial)[span.start : span.end].tolist()
        said = tokens[:-1] if tokens[-1] in self._stop_ids else tokens
        parser = self._dialogue(work).parser
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
        self.context.channel.send(Increment(*told, part.called, part.awaits))
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
        assert work.session is not None and work.episode is not None
        result = await work.session.reward()
        return Score(result.reward or 0.0, result.parts, "", result.t0, result.t1)

    def let_go(self, work: Work) -> None:
        """Its environment is not needed any more."""
        if work.session is not None:
            work.session.close()
            work.session = None
