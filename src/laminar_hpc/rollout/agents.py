"""Trajectories whose turns an agent asks for: a user's function that talks to the model by URL.

    the agent runs in an environment worker ------------------------------------> it returns the reward
       request -> its new messages are given -> turn -> the answer -> ... next request

The trajectory's prompt is the first token of every conversation; what the agent writes, from its first
message on, is given. It does not move: it goes on here, or begins again elsewhere.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence

from laminar_hpc.cluster.context import RoleContext
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.environments.reward_protocol import Result
from laminar_hpc.gateway.chat import MODEL, Chat, Refused, Turn, completion
from laminar_hpc.gateway.dialogues import Dialogues
from laminar_hpc.gateway.server import Gateway
from laminar_hpc.gateway.session import Question
from laminar_hpc.gateway.session import Session as Door
from laminar_hpc.gateway.tokens import Prompt, confirm, continued, generated, known, token_fields
from laminar_hpc.rollout.batch import Turn as Draw
from laminar_hpc.rollout.episodes import Episodes
from laminar_hpc.rollout.work import Outcome, Work, logprobs_of, tokens_of
from laminar_hpc.turns.calls import Malformed, ToolCall
from laminar_hpc.turns.conversation import Messages
from laminar_hpc.turns.dialogue import Dialogue
from laminar_hpc.turns.episode import Episode
from laminar_hpc.turns.history import goes_on
from laminar_hpc.turns.pool import EnvironmentPool
from laminar_hpc.turns.session import EnvironmentFailed
from laminar_hpc.turns.tools import is_error
from laminar_hpc.verifiers.pool import VerifiersPool

logger = logging.getLogger(__name__)
_LIMITS = {"turns": "max_turns", "calls": "max_tool_calls", "time": "max_seconds"}


class AgentEpisodes(Episodes):
    """See Episodes."""

    def __init__(self, context: RoleContext, stop_ids: Sequence[int]) -> None:
        super().__init__(context, stop_ids)
        self._agents: EnvironmentPool | VerifiersPool = self.pool
        if self.limits.verifiers:
            self._agents = VerifiersPool(self.limits)
        self.gateway = Gateway(context.config.sampling.max_response_tokens, self.branches)
        self._dialogues = Dialogues(self._model, self.limits.history == "refuse")
        self.vocabulary = self._dialogues.vocabulary

    async def start(self) -> None:
        """Raises LaminarError for an agent that cannot be used."""
        await asyncio.gather(self._agents.start(), self.gateway.start())
        if why := await self._dialogues.start():
            logger.warning("agents of this run can have no tools: %s", why)

    async def close(self) -> None:
        """Ends all agents."""
        await self.gateway.close()
        await self._agents.close()
        if self._agents is not self.pool:
            await super().close()

    # ---- one trajectory ------------------------------------------------------------------------------------

    async def _episode(self, work: Work, turn: Draw) -> Outcome:
        work.episode = Episode(self.limits, work.partial.time_started or time.time())
        work.bound, work.finish_reason = self.bound, ""
        t0 = time.time()
        work.session = await self._agents.open(work.group.row)
        work.episode.reset(t0, time.time() - t0)
        door = self.gateway.open()
        agent = asyncio.create_task(work.session.run(base_url=door.url, api_key=door.key, model=MODEL))
        try:
            talk = _Talk(self, work, door, draw=turn)
            outcome = await talk.held(agent)
            if not (outcome.moved_away or outcome.lost):
                work.score = self._scored(talk, agent)
            return outcome
        finally:
            self.gateway.shut(door)
            self.let_go(work)
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)

    def _scored(self, talk: "_Talk", agent: asyncio.Task[Result]) -> Score:
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
            return Score(instead, {}, f"{error}, behind the limit '{talk.work.finish_reason}'", now, now)

    async def grade(self, work: Work) -> Score:
        """See Episodes."""
        assert work.score is not None
        return work.score

    # ---- for a talk ----------------------------------------------------------------------------------------

    async def dialogue(self, tools: list[dict]) -> Dialogue:
        """Raises Refused."""
        try:
            return await self._dialogues.of(tools)
        except LaminarError as error:
            raise Refused(str(error)) from None

    def said(self, dialogue: Dialogue, chat: Chat, drawn: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """A turn's text and its calls. One that cannot be read stays text: the agent decides."""
        kept = list(drawn[:-1] if drawn[-1] in self._stop_ids else drawn)
        if chat.calls and dialogue.parser is not None:
            beside, calls = dialogue.parser.split(self._decoder.text(kept, specials=True))
            if calls and not isinstance(calls, Malformed):
                return beside.strip(), calls
        return self._decoder.text(kept), []

    def goes_on(self, dialogue: Dialogue, work: Work, messages: Messages) -> bool:
        """The template's text of all messages begins with what the model has seen and said."""
        seen = work.sequence
        stopped = int(seen[-1]) in self._stop_ids
        return goes_on(self._text(seen[: len(seen) - stopped]), dialogue.conversation.written(messages))

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Of each token."""
        return [self._decoder.text([token], specials=True) for token in tokens]

    def waited(self, work: Work, t0: float) -> None:
        """For the agent's next request."""
        self._record(work, t0, "agent")


class _Talk:
    """One trajectory's questions, one after the other."""

    def __init__(self, episodes: AgentEpisodes, work: Work, door: Door, draw: Draw) -> None:
        self.episodes, self.work, self.door, self.draw = episodes, work, door, draw
        assert work.episode is not None
        self.episode: Episode = work.episode
        self.calls: list[ToolCall] = []  # of the last turn
        self.limited = False  # it has met a limit of the run
        self.numbered = 0  # calls
        # by place among the messages: where each was drawn, and from where on its branch is
        self.answers = dict[int, tuple[int, int, int]]()
        self.seen = 0  # tokens that this engine has had
        self.anew = False  # the question's tokens begin a branch

    async def held(self, agent: asyncio.Task[Result]) -> Outcome:
        """Until the agent has returned, or failed behind a limit. Raises EnvironmentFailed."""
        since, outcome = time.time(), Outcome()
        while (question := await self._next(agent, since)) is not None:
            try:
                tokens = await self._given(question, since)
            except Refused as why:
                self.door.refuse(why)
                continue
            outcome = await self._drawn(question, tokens)
            if outcome.moved_away or outcome.lost is not None:
                return outcome
            since = time.time()
        if not self.episode.turns:
            agent.result()
            raise EnvironmentFailed("the agent has ended, and asked the model for nothing")
        return outcome

    async def _next(self, agent: asyncio.Task[Result], since: float) -> Question | None:
        """None: the agent has ended, or takes its time behind a limit. Questions that are refused buy it no
        time."""
        limit = self.episode.limits.timeout_seconds
        asking = asyncio.create_task(self.door.question())
        try:
            left = max(0.0, since + limit - time.time())
            await asyncio.wait({asking, agent}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if agent.done():
                return None
            if asking.done():
                return asking.result()
        finally:
            asking.cancel()
        if self.limited:
            return None
        raise EnvironmentFailed(f"the agent neither asked nor returned for {limit:g} s")

    async def _given(self, question: Question, since: float) -> list[int]:
        """The tokens of its new messages. Raises Refused, and EnvironmentFailed where there is nothing to
        grade without them."""
        work, chat = self.work, question.chat
        self.anew = question.anew
        names = [call.name for call in self.calls]
        if self.episode.turns and (limit := self.episode.limit(names, time.time())):
            work.finish_reason, self.limited = limit, True
            raise Refused(f"the trajectory has met environment.{_LIMITS[limit]}", code="laminar_limit")
        if isinstance(chat, Prompt):
            tokens = self._continued(chat)
        else:
            self._confirm(chat)
            tokens = self._tokens(await self.episodes.dialogue(chat.tools), question)
        if len(tokens) >= work.room:
            left = f"sampling.max_response_tokens leaves {work.room}"
            text = f"this exceeds the context length: it needs {len(tokens)} tokens more, {left}"
            if not self.episode.turns:
                raise EnvironmentFailed(text)
            work.finish_reason, self.limited = "length", True
            raise Refused(text, code="context_length_exceeded")
        if self.episode.turns:
            results = [message["content"] for message in question.more if message["role"] == "tool"]
            self.episode.called(names, sum(map(is_error, results)), time.time() - since)
            self.episodes.waited(work, since)
        return tokens

    def _continued(self, prompt: Prompt) -> list[int]:
        """Raises Refused."""
        vocabulary, begun = self.episodes.vocabulary, self.episode.turns > 0
        try:
            return continued(prompt, self.work.sequence.tolist(), begun, vocabulary)
        except Refused:
            if not (self.episodes.branches and begun):
                raise
            self.anew = True
            return known(prompt.token_ids, vocabulary)

    def _before(self, branch: int, start: int) -> list[int]:
        """What the model saw before it drew its tokens from `start` on, in the branch that begins at
        `branch`; 0: the first."""
        given = tokens_of(self.work.partial)[branch:start].tolist()
        return given if branch else [*self.work.group.prompt_tokens, *given]

    def _confirm(self, chat: Chat) -> None:
        """Raises Refused for token ids that are not those of the answer. Of a history that was rewritten only
        the present branch is known."""
        for claim in [] if self.anew else chat.claims:
            if (place := self.answers.get(claim.at)) is None:
                if self.work.starts:
                    continue
                raise Refused(f"messages[{claim.at}]: it has token ids, and is no answer of this session")
            branch, start, end = place
            drawn = tokens_of(self.work.partial)[start:end].tolist()
            logprobs = logprobs_of(self.work.partial)[start:end].tolist()
            confirm(claim, self._before(branch, start), drawn, logprobs)

    def _tokens(self, dialogue: Dialogue, question: Question) -> list[int]:
        """Raises Refused."""
        work, more, chat = self.work, question.more, question.chat
        assert isinstance(chat, Chat)
        try:
            if self.episode.turns:
                rewritten = self.episodes.branches and not self.episodes.goes_on(
                    dialogue, work, chat.messages
                )
                if self.anew or rewritten:
                    self.anew = True
                    return dialogue.conversation.first(chat.messages)
                if dialogue.no_user and any(message["role"] == "user" for message in more):
                    raise Refused(dialogue.no_user)
                return dialogue.conversation.after(int(tokens_of(work.partial)[-1]), more)
            tokens, prompt = dialogue.conversation.first(more), work.group.prompt_tokens
        except LaminarError as error:
            raise Refused(str(error)) from None
        if tokens[: len(prompt)] != prompt:
            raise Refused("messages: the model's chat template begins them unlike other conversations")
        return tokens[len(prompt) :]

    async def _drawn(self, question: Question, tokens: list[int]) -> Outcome:
        """One turn, with its answer."""
        work, chat = self.work, question.chat
        if self.anew:
            work.branch()
            self.answers, self.seen = {}, 0
        work.give(tokens)
        before, start, whole = work.partial.tokens, work.partial.count, work.max_response_tokens
        work.cached_tokens, t0 = 0, time.time()
        if chat.max_tokens is not None:
            work.max_response_tokens = min(whole, start + chat.max_tokens)
        try:
            outcome = await self.draw(work)
        finally:
            work.max_response_tokens = whole
        if outcome.moved_away or outcome.lost is not None:
            return outcome
        if not work.partial.tokens.startswith(before):
            return Outcome(lost="its earlier turns are not what they were")
        if work.partial.count == start:
            return Outcome(lost="the engine returned no token")
        self.limited = work.room == 0
        self.episode.waited(work.waited)
        self.episode.turn(self.seen, work.cached_tokens, time.time() - t0 - work.waited)
        self.seen = len(work.sequence)
        await self._answer(chat, start)
        return outcome

    async def _answer(self, chat: Chat | Prompt, start: int) -> None:
        if isinstance(chat, Prompt):
            self.calls = []
            self.door.answer(generated(self._turn(start, {})), {})
            return
        drawn = tokens_of(self.work.partial)[start:].tolist()
        content, self.calls = self.episodes.said(await self.episodes.dialogue(chat.tools), chat, drawn)
        message: dict = {"role": "assistant", "content": content}
        theirs = dict(message)
        if self.calls:
            calls = [self._call(call) for call in self.calls]
            message["tool_calls"] = calls
            theirs["tool_calls"] = [{**c, "function": _written(c["function"])} for c in calls]
        turn = self._turn(start, theirs, self.episodes.texts(drawn) if chat.logprobs else ())
        theirs |= token_fields(turn) if chat.token_fields else {}
        self.answers[len(chat.messages)] = self._branch, start, self.work.partial.count
        self.door.answer(completion(turn, chat), message)

    @property
    def _branch(self) -> int:
        return self.work.starts[-1] if self.work.starts else 0

    def _turn(self, start: int, message: dict, texts: Sequence[str] = ()) -> Turn:
        """The last one, which was drawn from `start` on."""
        work, finish = self.work, "tool_calls" if self.calls else "stop"
        tokens = tokens_of(work.partial)
        return Turn(
            self.episode.turns,
            int(time.time()),
            self._before(self._branch, start),
            tokens[start:].tolist(),
            logprobs_of(work.partial)[start:].tolist(),
            texts,
            message,
            "length" if work.finish_reason == "length" else finish,
            work.cached_tokens,
        )

    def _call(self, call: ToolCall) -> dict:
        """Its id has nine letters, as some templates want."""
        self.numbered += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call{self.numbered:05d}", "type": "function", "function": function}


def _written(function: dict) -> dict:
    """A call's function as OpenAI's API has it."""
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
