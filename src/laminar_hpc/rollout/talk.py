"""One trajectory's questions and answers: what its agent asks becomes tokens that are given, a turn is drawn,
and what was said goes back.

    question -> the tokens of its new messages, or a branch -> drawn -> the answer
                refused, or a limit of the run

Made by agents.py, one for each life of a trajectory.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.gateway.chat import Chat, DrawnTurn, Rejected, completion
from laminar_hpc.environments.gateway.dialogues import Dialogues
from laminar_hpc.environments.gateway.session import Door, Question
from laminar_hpc.environments.gateway.tokens import (
    TokenPrompt,
    confirm,
    continued,
    generated,
    known,
    token_fields,
)
from laminar_hpc.environments.turns.calls import ToolCall
from laminar_hpc.environments.turns.episode import Episode
from laminar_hpc.environments.turns.model import Dialogue
from laminar_hpc.environments.turns.session import EnvironmentFailed
from laminar_hpc.environments.turns.tools import is_error
from laminar_hpc.environments.workers.protocol import CallResult
from laminar_hpc.machine.own_time import own_time, within
from laminar_hpc.rollout.batch import Turn as Draw
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.partial_response import logprobs_of, tokens_of

_LIMITS = {"turns": "max_turns", "calls": "max_tool_calls", "time": "max_seconds"}


class Talk:
    """Owns `trajectory` while the agent has it. `branches`: what is rewritten begins one;
    `waited(trajectory, since)`: the agent has asked again."""

    def __init__(
        self,
        dialogues: Dialogues,
        branches: bool,
        trajectory: TrajectoryInFlight,
        door: Door,
        draw: Draw,
        waited: Callable[[TrajectoryInFlight, float], None],
    ) -> None:
        self._dialogues = dialogues
        self._branches = branches
        self._waited = waited
        self.trajectory = trajectory
        self.door = door
        self.draw = draw
        assert trajectory.episode is not None
        self.episode: Episode = trajectory.episode
        self.calls: list[ToolCall] = []  # of the last turn
        self.limited = False  # it has met a limit of the run
        self.finish = ""  # of the last turn
        self.numbered = 0  # calls
        # by place among the messages: where each was drawn, and from where on its branch is
        self.answers = dict[int, tuple[int, int, int]]()
        self.seen = 0  # tokens that this engine has had
        self.anew = False  # the question's tokens begin a branch

    async def held(self, agent: asyncio.Task[CallResult]) -> Outcome:
        """Until the agent has returned, or failed behind a limit. Raises EnvironmentFailed."""
        since, clock, outcome = time.time(), own_time(), Outcome()
        while (question := await self._next(agent, clock)) is not None:
            try:
                tokens = await self._given(question, since)
            except Rejected as why:
                self.door.refuse(why)
                continue
            outcome = await self._drawn(question, tokens)
            if outcome.moved_away or outcome.lost is not None:
                return outcome
            since, clock = time.time(), own_time()
        if not self.episode.turns:
            agent.result()
            raise EnvironmentFailed("the agent has ended, and asked the model for nothing")
        return outcome

    async def _next(self, agent: asyncio.Task[CallResult], since: float) -> Question | None:
        """None: the agent has ended, or takes its time behind a limit. Questions that are refused buy it no
        time. `since`: when it had its last answer (own_time)."""
        limit = self.episode.limits.timeout_seconds
        asking = asyncio.create_task(self.door.question())
        try:
            with contextlib.suppress(TimeoutError):
                async with within(since + limit - own_time()):
                    await asyncio.wait({asking, agent}, return_when=asyncio.FIRST_COMPLETED)
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
        """The tokens of its new messages. Raises Rejected, and EnvironmentFailed where there is nothing to
        grade without them."""
        trajectory, chat = self.trajectory, question.chat
        self.anew = question.anew
        names = [call.name for call in self.calls]
        if self.episode.turns and (limit := self.episode.limit(names, time.time())):
            trajectory.finish_reason = limit
            self.limited = True
            raise Rejected(f"the trajectory has met environment.{_LIMITS[limit]}", code="laminar_limit")
        if isinstance(chat, TokenPrompt):
            tokens = self._continued(chat)
        else:
            self._confirm(chat)
            tokens = self._tokens(await self._dialogues.of(chat.tools), question)
        if len(tokens) >= trajectory.room:
            left = f"sampling.max_response_tokens leaves {trajectory.room}"
            text = f"this exceeds the context length: it needs {len(tokens)} tokens more, {left}"
            if not self.episode.turns:
                raise EnvironmentFailed(text)
            trajectory.finish_reason = "length"
            self.limited = True
            raise Rejected(text, code="context_length_exceeded")
        if self.episode.turns:
            results = [message["content"] for message in question.more if message["role"] == "tool"]
            self.episode.called(names, sum(map(is_error, results)), time.time() - since)
            self._waited(trajectory, since)
        return tokens

    def _continued(self, prompt: TokenPrompt) -> list[int]:
        """Raises Rejected."""
        vocabulary, begun = self._dialogues.vocabulary, self.episode.turns > 0
        try:
            return continued(prompt, self.trajectory.sequence.tolist(), begun, vocabulary)
        except Rejected:
            if not (self._branches and begun):
                raise
            self.anew = True
            return known(prompt.token_ids, vocabulary)

    def _before(self, branch: int, start: int) -> list[int]:
        """What the model saw before it drew its tokens from `start` on, in the branch that begins at
        `branch`; 0: the first."""
        given = tokens_of(self.trajectory.partial)[branch:start].tolist()
        return given if branch else [*self.trajectory.group.prompt_tokens, *given]

    def _confirm(self, chat: Chat) -> None:
        """Raises Rejected for token ids that are not those of the answer. Of a history that was rewritten
        only the present branch is known."""
        for claim in [] if self.anew else chat.claims:
            if (place := self.answers.get(claim.at)) is None:
                if self.trajectory.starts:
                    continue
                raise Rejected(f"messages[{claim.at}]: it has token ids, and is no answer of this session")
            branch, start, end = place
            drawn = tokens_of(self.trajectory.partial)[start:end].tolist()
            logprobs = logprobs_of(self.trajectory.partial)[start:end].tolist()
            confirm(claim, self._before(branch, start), drawn, logprobs)

    def _tokens(self, dialogue: Dialogue, question: Question) -> list[int]:
        """Raises Rejected."""
        trajectory, more, chat = self.trajectory, question.more, question.chat
        assert isinstance(chat, Chat)
        try:
            if self.episode.turns:
                if self.anew or (self._branches and not self._goes_on(dialogue, chat)):
                    self.anew = True
                    return dialogue.conversation.first(chat.messages)
                if dialogue.no_user and any(message["role"] == "user" for message in more):
                    raise Rejected(dialogue.no_user)
                return dialogue.conversation.after(int(tokens_of(trajectory.partial)[-1]), more)
            tokens, prompt = dialogue.conversation.first(more), trajectory.group.prompt_tokens
        except LaminarError as error:
            raise Rejected(str(error)) from None
        if tokens[: len(prompt)] != prompt:
            raise Rejected("messages: the model's chat template begins them unlike other conversations")
        return tokens[len(prompt) :]

    def _goes_on(self, dialogue: Dialogue, chat: Chat) -> bool:
        """The template's text of all messages begins with what the model has seen and said."""
        return self._dialogues.goes_on(self.trajectory.sequence, dialogue.conversation.written(chat.messages))

    async def _drawn(self, question: Question, tokens: list[int]) -> Outcome:
        """One turn, with its answer."""
        trajectory, chat = self.trajectory, question.chat
        if self.anew:
            trajectory.branch()
            self.answers = {}
            self.seen = 0
        trajectory.give(tokens)
        before, start, whole = (
            trajectory.partial.tokens,
            trajectory.partial.count,
            trajectory.max_response_tokens,
        )
        trajectory.cached_tokens = 0
        t0 = time.time()
        if chat.max_tokens is not None:
            trajectory.max_response_tokens = min(whole, start + chat.max_tokens)
        try:
            outcome = await self.draw(trajectory)
        finally:
            trajectory.max_response_tokens = whole
        if outcome.moved_away or outcome.lost is not None:
            return outcome
        if not trajectory.partial.tokens.startswith(before):
            return Outcome(lost="its earlier turns are not what they were")
        if trajectory.partial.count == start:
            return Outcome(lost="the engine returned no token")
        trajectory.cut(start + self._dialogues.length(chat, tokens_of(trajectory.partial)[start:].tolist()))
        self.finish = trajectory.finish_reason
        self.limited = trajectory.room == 0
        if not self.limited:  # a turn that the agent has cut is no trajectory that was
            trajectory.finish_reason = "stop"
        self.episode.waited(trajectory.waited)
        self.episode.turn(self.seen, trajectory.cached_tokens, time.time() - t0 - trajectory.waited)
        self.seen = len(trajectory.sequence)
        await self._answer(chat, start)
        return outcome

    async def _answer(self, chat: Chat | TokenPrompt, start: int) -> None:
        if isinstance(chat, TokenPrompt):
            self.calls = []
            self.door.answer(generated(self._turn(start, {})), {})
            return
        drawn = tokens_of(self.trajectory.partial)[start:].tolist()
        content, self.calls = self._dialogues.said(await self._dialogues.of(chat.tools), chat, drawn)
        message: dict = {"role": "assistant", "content": content}
        theirs = dict(message)
        if self.calls:
            calls = [self._call(call) for call in self.calls]
            message["tool_calls"] = calls
            theirs["tool_calls"] = [{**c, "function": _written(c["function"])} for c in calls]
        turn = self._turn(start, theirs, self._dialogues.texts(drawn) if chat.logprobs else ())
        theirs |= token_fields(turn) if chat.token_fields else {}
        self.answers[len(chat.messages)] = self._branch, start, self.trajectory.partial.count
        self.door.answer(completion(turn, chat), message)

    @property
    def _branch(self) -> int:
        return self.trajectory.starts[-1] if self.trajectory.starts else 0

    def _turn(self, start: int, message: dict, texts: Sequence[str] = ()) -> DrawnTurn:
        """The last one, which was drawn from `start` on."""
        trajectory, finish = self.trajectory, "tool_calls" if self.calls else "stop"
        tokens = tokens_of(trajectory.partial)
        return DrawnTurn(
            self.episode.turns,
            int(time.time()),
            self._before(self._branch, start),
            tokens[start:].tolist(),
            logprobs_of(trajectory.partial)[start:].tolist(),
            texts,
            message,
            "length" if self.finish == "length" else finish,
            trajectory.cached_tokens,
        )

    def _call(self, call: ToolCall) -> dict:
        """Writes a call with an id of nine letters, as some templates want."""
        self.numbered += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call{self.numbered:05d}", "type": "function", "function": function}


def _written(function: dict) -> dict:
    """A call's function as OpenAI's API has it."""
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
