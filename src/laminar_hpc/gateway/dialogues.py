"""A model's way to talk with the tools that an agent gives it: its conversation and its parser of calls, made
once for each list of tools."""

import asyncio
import json
from collections import OrderedDict
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.data.tokens import load_tokenizer
from laminar_hpc.turns.calls import CallParser
from laminar_hpc.turns.dialogue import Dialogue
from laminar_hpc.turns.model import conversation, with_tools

_KEPT = 64  # lists of tools
_PROBE = {"name": "probe", "description": "Nothing.", "parameters": {"type": "object", "properties": {}}}


class Dialogues:
    """Of one model. `grows`: a template that rewrites earlier turns is refused."""

    def __init__(self, model: Path, grows: bool = True) -> None:
        self._grows = grows
        self._model, self._tokenizer = str(model), load_tokenizer(str(model))
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._known: OrderedDict[str, Dialogue] = OrderedDict()
        self._making = asyncio.Lock()

    async def start(self) -> str:
        """Takes the seconds that SGLang's parsers need. Why tools cannot be used, or ""."""
        try:
            await self.of([{"type": "function", "function": _PROBE}])
        except LaminarError as error:
            return str(error)
        return ""

    async def of(self, tools: list[dict]) -> Dialogue:
        """Raises LaminarError where the model's template has no tools, or rewrites what was said."""
        name = json.dumps(tools, sort_keys=True)
        async with self._making:
            if name not in self._known:
                self._known[name] = await asyncio.to_thread(self._make, tools)
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(name)
            return self._known[name]

    def _make(self, tools: list[dict]) -> Dialogue:
        by = "tool" if tools else ""
        talk = conversation(self._model, tools, self._tokenizer, by, self._grows)
        parser, no_user = None, ""
        if tools:
            try:
                parser = CallParser(tools, with_tools(self._model, tools))
            except ValueError as error:  # pydantic's
                raise LaminarError(f"tools: SGLang cannot read them ({str(error).splitlines()[0]})") from None
        try:
            talk.check("user")
        except LaminarError as error:
            no_user = str(error)
        return Dialogue(talk, parser, no_user)
