"""The calls of a turn: found in what the model has said, made, and what they come to as the tokens that stand
behind it.

    a turn's text -> its calls -> made here, each once -----------------------> Answer: tokens
                               -> Ask -> made where the environment is ------->
                               -> made by the replica that had the trajectory ->

Owned by episodes.py. While the calls are made the trajectory may move (answers.py); an environment of a
factory stays where it was made, and answers for trajectories that are elsewhere (homes.py). The controller
knows of calls before they are made.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.environments.turns.calls import Malformed, ToolCall
from laminar_hpc.environments.turns.conversation import ToolResult
from laminar_hpc.environments.turns.model import Dialogue, dialogue
from laminar_hpc.environments.turns.pool import environment_of
from laminar_hpc.environments.turns.session import EnvironmentFailed, EnvironmentHangs, Session
from laminar_hpc.environments.turns.tools import error_text, is_error
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import Partial, VersionSpan
from laminar_hpc.line.messages.homes import Ask, replica_of
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.rollout.answers import CallAnswers, name_of
from laminar_hpc.rollout.homes import EnvironmentHomes, Home
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.move_source import HandOver
from laminar_hpc.rollout.partial_response import tokens_of
from laminar_hpc.store.payload.layout import Tokens, tokens_array

logger = logging.getLogger(__name__)
Found = list[ToolCall] | Malformed  # in a turn


class TurnCalls:
    """A replica's. `stateful`: environments stay at their homes. `dialogues`: by name of the environment."""

    def __init__(
        self, context: RoleContext, stop_ids: Sequence[int], stateful: bool, hand_over: HandOver
    ) -> None:
        self._context = context
        self._limits = context.config.environment
        self._stateful = stateful
        self._stop_ids = frozenset(stop_ids)
        self._model = Path(context.config.model.path)
        self._decoder = TextDecoder(self._model)
        self.answers = CallAnswers(context.channel, hand_over)
        kept = self._limits.max_seconds + self._limits.timeout_seconds
        self.homes = EnvironmentHomes(context.index, context.channel, self._made_for_others, kept)
        self.dialogues: dict[str, Dialogue] = {}

    async def learn(self, name: str, tools: Sequence[dict]) -> None:
        """The tools of one environment. Raises LaminarError for templates and formats that do not work."""
        grows = self._limits.history == "refuse"
        arguments = self._context.config.data.chat_template_arguments
        made = await asyncio.to_thread(dialogue, str(self._model), tools, grows, arguments)
        self.dialogues[name] = made
        assert made.parser is not None
        logger.info("tool calls are read by SGLang's parser '%s'", made.parser.name)

    async def close(self) -> None:
        """Calls that are still made are given up."""
        await self.answers.close()
        await self.homes.close()

    # ---- what a turn says ----------------------------------------------------------------------------------

    def found(self, trajectory: TrajectoryInFlight, span: VersionSpan) -> Found:
        """In the turn that was drawn so, whose stop token is no part of a call."""
        tokens = tokens_of(trajectory.partial)[span.start : span.end].tolist()
        said = tokens[:-1] if tokens[-1] in self._stop_ids else tokens
        parser = self.dialogue(trajectory.group.row).parser
        assert parser is not None
        return parser.calls(self._decoder.text(said, specials=True))

    def ends_a_turn(self, part: Partial) -> bool:
        """It has moved with its turn's last token, before anybody looked for calls."""
        drawn_last = bool(part.spans) and part.spans[-1].end == part.count
        return drawn_last and int(tokens_of(part)[-1]) in self._stop_ids

    def dialogue(self, row: dict) -> Dialogue:
        """Returns the dialogue of the environment that a row names."""
        return self.dialogues[environment_of(self._limits, row)]

    def text(self, tokens: Tokens) -> str:
        """With the marks of roles."""
        return self._decoder.text(tokens.tolist(), specials=True)

    # ---- what its calls come to ----------------------------------------------------------------------------

    async def answer(self, trajectory: TrajectoryInFlight, found: Found) -> Answer:
        """What the calls of its last turn come to, wherever made. Raises Ended and EnvironmentFailed."""
        part, last = trajectory.partial, int(tokens_of(trajectory.partial)[-1])
        away = self._stateful and trajectory.session is None and isinstance(found, list)
        maker = replica_of(part.home) if away else self._context.index
        name = part.awaits or name_of(maker, trajectory.trajectory_id, trajectory.attempt, part.count)
        elsewhere = bool(part.awaits) or away
        part.called = True
        part.awaits = name if elsewhere else ""
        self.tell(trajectory)
        if not elsewhere:
            making = self._made(trajectory, trajectory.session, name, found, last)
            return await self.answers.made_here(trajectory, name, making)
        if self._stateful and isinstance(found, list):  # the same name is called once
            calls = [(call.name, json.dumps(call.arguments)) for call in found]
            ask = Ask(trajectory.trajectory_id, part.home, name, calls, last)
            if trajectory.session is None:
                self._context.channel.send(ask)
            else:  # it has come back: by way of the controller this could be late, when all has ended
                self.homes.arrived(ask)
        count = len(found) if isinstance(found, list) else 1
        waiting = self.answers.made_elsewhere(trajectory, count * self._limits.timeout_seconds)
        if not away:  # who makes them records them
            return await waiting
        with self.recorded(trajectory, _what(found)):
            return await waiting

    async def _made(
        self, trajectory: TrajectoryInFlight, session: Session | None, name: str, found: Found, last: int
    ) -> Answer:
        """The calls of its last turn."""
        t0 = time.time()
        self.homes.calls(trajectory, name)
        try:
            with self.recorded(trajectory, _what(found)):
                results = await self._results(session, found)
        except EnvironmentFailed:
            self.homes.failed(trajectory)
            raise
        given = self._behind(trajectory, results)
        answer = self._told(trajectory.trajectory_id, name, trajectory.group.row, results, last, t0, given)
        self.homes.calls(trajectory, name, answer)
        return answer

    def _behind(self, trajectory: TrajectoryInFlight, results: list[ToolResult]) -> list[int] | None:
        """What begins a branch, where the template has rewritten earlier turns."""
        if trajectory.history is None:
            return None
        span, stopped = trajectory.partial.spans[-1], int(trajectory.sequence[-1]) in self._stop_ids
        seen, end = trajectory.sequence, trajectory.partial.count - stopped
        said = tokens_of(trajectory.partial)[span.start : end]
        return trajectory.history.answered(self.text(seen[: len(seen) - stopped]), self.text(said), results)

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
            given = self.dialogue(row).conversation.between(last, results)
        return Answer(trajectory_id, name, tokens_array(given).tobytes(), failed, time.time() - t0)

    async def _results(self, session: Session | None, found: Found) -> list[ToolResult]:
        """One after the other, as they may depend on each other."""
        if isinstance(found, Malformed):
            return [ToolResult("error", error_text(found.reason))]
        assert session is not None
        return [ToolResult(call.name, await session.call(call.name, call.arguments)) for call in found]

    # ---- who hears of it -----------------------------------------------------------------------------------

    def tell(self, trajectory: TrajectoryInFlight) -> None:
        """The pool knows all of it: between a whole turn and its result a call may have been made."""
        if self._context.config.rollout.increment_tokens and trajectory.is_told:
            self._context.channel.send(trajectory.increment(trajectory.told))

    @contextlib.contextmanager
    def recorded(self, trajectory: TrajectoryInFlight, what: str) -> Iterator[None]:
        """In the trace with how it ended; "" is nothing."""
        t0 = time.time()
        try:
            yield
        except EnvironmentFailed as error:
            self.record(trajectory, t0, what, "hung" if isinstance(error, EnvironmentHangs) else "failed")
            raise
        if what:
            self.record(trajectory, t0, what)

    def record(self, trajectory: TrajectoryInFlight, t0: float, what: str, failed: str = "") -> None:
        """What it waited for since `t0`, in the trace."""
        of = {
            "trajectory_id": trajectory.trajectory_id,
            "attempt": trajectory.attempt,
            "evaluation": trajectory.evaluation,
        }
        more = {"failed": failed} if failed else {}
        self._context.trace.record("tool", t0, time.time(), **of, what=what, waited=trajectory.waited, **more)


def _what(found: Found) -> str:
    """The calls of a turn, in the trace."""
    return "malformed" if isinstance(found, Malformed) else ",".join(call.name for call in found)
