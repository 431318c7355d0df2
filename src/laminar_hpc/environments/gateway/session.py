"""One trajectory's session: what was said in it, which only grows, and the question that is open. Owns no
task and no socket; server.py and rollout/talk.py meet here. With environment.history=branch what does not
go on from it begins anew.

    agent -> server.py -> ask(chat)                       waits
                          question() -> rollout/talk.py draws a turn -> answer(body), or refuse(why)

A question that was asked before has the answer that it had then, or shares it: nothing is drawn twice.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from laminar_hpc.environments.gateway.chat import Chat, Rejected
from laminar_hpc.environments.gateway.tokens import TokenPrompt
from laminar_hpc.environments.turns.calls import thought_and_rest
from laminar_hpc.environments.turns.conversation import Messages

_GROWS = (
    "a session's conversation only grows; send back what it has, each answer as it was given, or set "
    "environment.history=branch"
)


@dataclass(frozen=True)
class Question:
    """`more`: the messages that are new, where the conversation begins `anew` those behind the last answer;
    of token ids rollout/talk.py knows both."""

    chat: Chat | TokenPrompt
    more: Messages
    answered: asyncio.Future[dict]
    anew: bool = False


class Door:
    """`url`: the agent's base_url; `key`: its api_key. `branches`: a rewritten history is not refused."""

    def __init__(self, url: str, key: str, branches: bool = False) -> None:
        self.url = url
        self.key = key
        self._branches = branches
        self._said: Messages = []
        self._tools: list[dict] = []
        self._dialect: type | None = None  # of the first question that was answered
        self._answers: dict[bytes, asyncio.Future[dict]] = {}
        self._asked: asyncio.Queue[Question] = asyncio.Queue()
        self._open: Question | None = None
        self._ended = ""
        self.refusals: list[str] = []  # reasons, of the agent's requests

    # ---- the agent's side ----------------------------------------------------------------------------------

    async def ask(self, chat: Chat | TokenPrompt) -> dict:
        """The answer. Raises Rejected."""
        if (known := self._answers.get(chat.digest)) is None:
            if self._ended:
                raise Rejected(self._ended, 503, "ended")
            if self._open is not None:
                raise Rejected("another request of this session is not answered yet; ask one after the other")
            more, anew = self._new(chat)
            if isinstance(chat, Chat) and not anew:  # what was said is as it was drawn
                chat = replace(chat, messages=[*self._said, *more])
            known = self._answers[chat.digest] = asyncio.get_running_loop().create_future()
            self._open = Question(chat, more, known, anew)
            self._asked.put_nowait(self._open)
        return await asyncio.shield(known)

    def _new(self, chat: Chat | TokenPrompt) -> tuple[Messages, bool]:
        """Messages and whether the conversation begins anew with them. Raises Rejected."""
        if self._dialect not in (None, type(chat)):
            raise Rejected("a session speaks in messages or in token ids, as it began; it cannot change")
        if isinstance(chat, TokenPrompt):
            return [], False
        try:
            more = added(self._said, chat.messages)
            if self._said and chat.tools != self._tools:
                raise Rejected(f"tools: they are not those of the request before; {_GROWS}")
        except Rejected:
            if not self._branches:
                raise
            answers = [at for at, message in enumerate(chat.messages) if message["role"] == "assistant"]
            return chat.messages[answers[-1] + 1 if answers else 0 :], True
        return more, False

    # ---- the trajectory's side -----------------------------------------------------------------------------

    async def question(self) -> Question:
        """The next one; it waits for `answer` or `refuse`."""
        return await self._asked.get()

    def answer(self, body: dict, message: dict) -> None:
        """Of the open question; `message`: the assistant's, for the template; ignored for token ids."""
        assert self._open is not None
        chat = self._open.chat
        self._dialect = type(chat)
        if isinstance(chat, Chat):
            self._said = [*chat.messages, message]
            self._tools = chat.tools
        self._open.answered.set_result(body)
        self._open = None

    def refuse(self, why: Rejected) -> None:
        """The open question; it may be asked again."""
        assert self._open is not None
        del self._answers[self._open.chat.digest]
        self._open.answered.set_exception(why)
        self._open.answered.exception()  # whoever asked may have gone
        self._open = None

    def end(self, why: str) -> None:
        """For good; what was answered can still be asked for."""
        self._ended = why
        if self._open is not None:
            self.refuse(Rejected(why, 503, "ended"))


def added(said: Messages, messages: Messages) -> Messages:
    """What `messages` has behind all of `said`. Raises Rejected for another history, or a wrong follower."""
    for at, (before, now) in enumerate(zip(said, messages, strict=False)):
        if _meant(before) != _meant(now):
            raise Rejected(f"messages[{at}] ({before['role']}) is not what it was: {_GROWS}")
    if len(messages) <= len(said):
        raise Rejected(f"messages: {len(messages)}, of {len(said)} that were said: {_GROWS}")
    more = messages[len(said) :]
    if said and (wrong := [m["role"] for m in more if m["role"] not in ("user", "tool")]):
        raise Rejected(f"messages: behind an answer stand the user's and tools' words, not the {wrong[0]}'s")
    return more


def _meant(message: dict) -> Sequence[object]:
    """What two ways of writing a message share: agents trim texts, write JSON anew, and leave out what was
    thought, or move it elsewhere."""
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    content = message["content"]
    if message["role"] == "assistant":
        content = thought_and_rest(content)[1].strip()
    return message["role"], content, calls, message.get("tool_call_id")
