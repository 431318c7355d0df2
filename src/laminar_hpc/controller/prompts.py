"""Prompts from rows, rendered and checked once at start-up, so that a bad row ends the run before it begins,
naming file and row."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import DataConfig
from laminar_hpc.config.source import Source
from laminar_hpc.controller.chat import Render, as_messages
from laminar_hpc.controller.rows import field as field_of
from laminar_hpc.controller.rows import read_rows


@dataclass(frozen=True)
class Prompt:
    """`text` is what the model sees, `row` what the reward gets."""

    text: str
    tokens: list[int]
    row: dict


@dataclass
class PromptSet:
    """The prompts of one source, and how many of its rows were left out."""

    source: Source
    prompts: list[Prompt] = field(default_factory=list)
    too_long: int = 0
    duplicates: int = 0

    def words(self) -> str:
        """For the line that is said before the run."""
        parts = [f"{self.source.path}: {len(self.prompts):,} prompts"]
        parts += [f"{self.too_long:,} too long and dropped"] if self.too_long else []
        parts += [f"{self.duplicates:,} duplicates dropped"] if self.duplicates else []
        return ", ".join(parts)


def load_tokenizer(model_path: str) -> Tokenizer:
    file = Path(model_path) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise LaminarError(
            f"{file} cannot be read as a tokenizer ({error}); "
            "the model directory needs a fast tokenizer's tokenizer.json"
        ) from None


def load_prompts(
    source: Source,
    data: DataConfig,
    tokenizer: Tokenizer,
    render: Render | None,
    room: int,
    limit: int | None = None,
) -> PromptSet:
    """All rows of a source, or its first `limit` prompts; at most `room` tokens fit into the model beside a
    response.

    `render` applies the chat template; None takes prompts as they are. Raises LaminarError for a row that
    cannot be used.
    """
    found, seen = PromptSet(source), set()
    most = min(room, data.max_prompt_tokens or room)
    for where, row in read_rows(source):
        if limit is not None and len(found.prompts) == limit:
            break
        text = _text(
            field_of(row, data.prompt_field, where, "data.prompt_field"), render, data.prompt_field, where
        )
        if data.answer_field:
            row = {**row, "answer": _answer(row, data.answer_field, where)}
        _check_sendable(text, row, where)
        if data.drop_duplicates:
            mark = hash((text, json.dumps(row.get("answer"), default=str)))
            if mark in seen:
                found.duplicates += 1
                continue
            seen.add(mark)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        if not tokens:
            raise LaminarError(f"{where}: the tokenizer makes no token of its prompt; mend the row")
        if len(tokens) > most:
            found.too_long += 1
            if data.too_long == "refuse":
                raise LaminarError(
                    f"{where}: the prompt has {len(tokens)} tokens, at most {most} fit; shorten it, set "
                    "data.too_long=drop, or raise "
                    + ("data.max_prompt_tokens" if most < room else "trainer.tokens_per_microbatch")
                )
            continue
        found.prompts.append(Prompt(text, tokens, row))
    if not found.prompts:
        if found.too_long:
            raise LaminarError(
                f"{source.path}: all {found.too_long} prompts have "
                f"more than {most} tokens; raise what bounds them"
            )
        raise LaminarError(f"{source.path} has no rows; one row per prompt is needed")
    return found


def _text(value: object, render: Render | None, name: str, where: str) -> str:
    """What the model shall see. Raises LaminarError when the row's prompt is neither a text nor messages for
    a template."""
    messages = as_messages(value) if value else None
    if messages is None:
        raise LaminarError(
            f"{where}: field '{name}' must be a non-empty string "
            f"or a list of chat messages, not {value!r:.60}"
        )
    if render is not None:
        return render(messages, where)
    if not isinstance(value, str):
        raise LaminarError(
            f"{where}: field '{name}' holds chat messages; "
            "set data.chat_template=true, or name a field with plain text"
        )
    return value


def _answer(row: dict, names: str, where: str) -> str | int | float:
    value = field_of(row, names, where, "data.answer_field")
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise LaminarError(
            f"{where}: field '{names}' must be a text or a number, "
            f"not {value!r:.60}; mend the row or set data.answer_field"
        )
    return value


def _check_sendable(text: str, row: dict, where: str) -> None:
    """Prompt and row cross between processes; what cannot shall not be found out in the middle of a run."""
    try:
        msgspec.msgpack.encode([text, row])
    except (TypeError, ValueError, OverflowError) as error:  # ValueError: also half of a surrogate pair
        raise LaminarError(
            f"{where}: a value cannot be sent to a rollout "
            f"({str(error)[:120]}); mend the row or drop the field"
        ) from None


def check_token_ids(found: PromptSet, vocab_size: int) -> None:
    """The tokenizer must not know more tokens than the model."""
    worst = max(max(p.tokens) for p in found.prompts)
    if worst >= vocab_size:
        raise LaminarError(
            f"{found.source.path}: the tokenizer gives token {worst}, "
            f"the model has {vocab_size}; model.path holds a tokenizer of another model"
        )
