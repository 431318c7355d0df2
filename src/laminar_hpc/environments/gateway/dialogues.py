"""A model's way to talk with the tools that an agent gives it: its conversation and its parser of calls, made
once for each list of tools, and what it has said as text."""

import asyncio
import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.data.tokens import TextDecoder, load_tokenizer
from laminar_hpc.environments.gateway.chat import Chat, Rejected
from laminar_hpc.environments.gateway.tokens import TokenPrompt
from laminar_hpc.environments.turns.calls import Malformed, ToolCall
from laminar_hpc.environments.turns.history import goes_on
from laminar_hpc.environments.turns.model import Arguments, Dialogue, dialogue
from laminar_hpc.store.payload.layout import Tokens

_KEPT = 64  # lists of tools
_PROBE = {"name": "probe", "description": "Nothing.", "parameters": {"type": "object", "properties": {}}}


class Dialogues:
    """Of one model, whose turns end with one of `stop_ids`. `grows`: a template that rewrites earlier turns
    is refused; `arguments`: of the template."""

    def __init__(
        self, model: Path, stop_ids: Sequence[int], grows: bool = True, arguments: Arguments = None
    ) -> None:
        self._arguments = arguments
        self._grows = grows
        self._stop_ids = frozenset(stop_ids)
        self._decoder = TextDecoder(model)
        self._model = str(model)
        self._tokenizer = load_tokenizer(str(model))
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._known: OrderedDict[str, Dialogue] = OrderedDict()
        self._making = asyncio.Lock()

    async def start(self) -> str:
        """Takes the seconds that SGLang's parsers need. Why tools cannot be used, or ""."""
        try:
            await self.of([{"type": "function", "function": _PROBE}])
        except Rejected as why:
            return str(why)
        return ""

    async def of(self, tools: list[dict]) -> Dialogue:
        """Raises Rejected where the model's template has no tools, or rewrites what was said."""
        name = json.dumps(tools, sort_keys=True)
        async with self._making:
            if name not in self._known:
                try:
                    self._known[name] = await asyncio.to_thread(self._make, tools)
                except LaminarError as error:
                    raise Rejected(str(error)) from None
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(name)
            return self._known[name]

    def _make(self, tools: list[dict]) -> Dialogue:
        try:
            made = dialogue(self._model, tools, self._grows, self._arguments, self._tokenizer)
        except ValueError as error:  # pydantic's
            raise LaminarError(f"tools: SGLang cannot read them ({str(error).splitlines()[0]})") from None
        try:
            made.conversation.check("user")
        except LaminarError as error:
            return replace(made, no_user=str(error))
        return made

    # ---- text of token ids ---------------------------------------------------------------------------------

    def length(self, chat: Chat | TokenPrompt, drawn: Sequence[int]) -> int:
        """How many of these tokens a turn has that ends where the request says: with one of its tokens, or
        with the token that completes one of its texts."""
        end = next((n for n, token in enumerate(drawn, 1) if token in chat.stop_token_ids), len(drawn))

        def stopped(tokens: int) -> bool:
            return any(stop in self._decoder.text(list(drawn[:tokens]), True) for stop in chat.stop)

        return bisect_left(range(end), True, key=stopped)

    def said(self, talk: Dialogue, chat: Chat, drawn: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """A turn's text up to where it was stopped and, if they are looked for, its calls. One that cannot be
        read stays text: the agent decides."""
        kept = list(drawn[:-1] if drawn[-1] in self._stop_ids else drawn)

        def text(specials: bool) -> str:
            whole = self._decoder.text(kept, specials)
            return min((whole.partition(stop)[0] for stop in chat.stop), key=len, default=whole)

        if chat.calls and talk.parser is not None:
            beside, found = talk.parser.split(text(True))
            if found and not isinstance(found, Malformed):
                return beside.strip(), found
        return text(False), []

    def goes_on(self, seen: Tokens, written: str) -> bool:
        """The template's text begins with what the model has seen and said."""
        end = len(seen) - (int(seen[-1]) in self._stop_ids)
        return goes_on(self._decoder.text(seen[:end].tolist(), specials=True), written)

    def texts(self, tokens: Sequence[int]) -> list[str]:
        return [self._decoder.text([token], specials=True) for token in tokens]
